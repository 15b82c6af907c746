"""The largest number (of sequences, of tokens) that fits: few trials, and a boundary that was tried on both sides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_PATIENCE = 6  # trials by estimate; then the rest of the interval is halved


@dataclass(frozen=True)
class Trial:
    """One run. `resting_bytes` is what is allocated at its end: what does not grow with the number."""

    number: int
    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    resting_bytes: int = 0
    out_of_memory: dict | None = None


@dataclass(frozen=True)
class Search:
    """What was found: `largest` fits (0: not even 1 does), `next` is the trial of one more, None beyond `most`."""

    largest: int
    tried: tuple[Trial, ...]
    next: Trial | None


def search(attempt: Callable[[int], Trial], capacity_bytes: int, *, first: int, most: int, power: int = 1) -> Search:
    """Find n such that n fits and n + 1 does not, both tried, or n = `most`.

    Args:
        attempt: runs one number and says how it went.
        capacity_bytes: what may be reserved.
        first: where to start, from 1 to `most`.
        power: 1 if memory grows with the number, 2 if with its square too (the length of a sequence).

    Each trial that fits tells how fast reserved memory grows, hence where it meets the capacity; that is tried next.
    """
    trials: dict[int, Trial] = {}
    low, high, stride, number = 0, most + 1, 1, first
    while high - low > 1:
        trials[number] = trial = attempt(number)
        low, high = (number, high) if trial.fits else (low, number)
        guess = _estimate([t for t in trials.values() if t.fits], capacity_bytes, power)
        if guess is None or len(trials) >= _PATIENCE and high - low > 2 * stride:
            number = (low + high) // 2
        elif low < guess < high:
            number = guess
        else:  # the estimate is behind us: look just beyond, then farther
            number = max(high - stride, low + 1) if guess >= high else min(low + stride, high - 1)
            stride *= 2
    return Search(low, tuple(trials.values()), trials.get(high))


def _estimate(fitting: list[Trial], capacity: int, power: int) -> int | None:
    """Where reserved memory meets the capacity, from the largest trials that fitted; None if there is none."""
    if not fitting:
        return None
    *others, last = sorted(fitting, key=lambda t: t.number)
    room, n, used = capacity - last.resting_bytes, last.number, last.peak_reserved_bytes - last.resting_bytes
    if room <= 0 or used <= 0:
        return n
    if power == 1:
        return int(n * room / used)
    if not others:
        return int(n * math.sqrt(room / used))
    m, less = others[-1].number, others[-1].peak_reserved_bytes - last.resting_bytes
    square = (used / n - less / m) / (n - m)  # used = line * n + square * n²
    line = used / n - square * n
    if square <= 0:
        return int(n * room / used)
    return int((math.sqrt(max(line * line + 4 * square * room, 0.0)) - line) / (2 * square))
