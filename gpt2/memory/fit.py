"""The largest number (of sequences, of tokens) that fits: few trials, and a boundary that was tried on both sides.

What fits for a few steps need not fit for good. With expandable segments holes come and go, and there are batches that
die in step 6 or 20. With segments of fixed size there is no such thing: 31 boundaries were simulated for 20 steps, on
five cards, the published 20 sequences of the A40 among them, and all hold. In 27 every step from the fifth on does
what the one before it did, address for address; the other 4 have max_split_size_mb, which gives segments back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

STEPS = 20  # of a run that shall be called to fit where segments are expandable
_PATIENCE = 6  # trials by estimate; then the rest is halved, once something failed, and till then doubled


@dataclass(frozen=True)
class Trial:
    """One run of `steps` steps, fewer if it ran out; 0: not counted. `resting_bytes` is what is allocated at its end:
    what does not grow with the number."""

    number: int
    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    resting_bytes: int = 0
    out_of_memory: dict | None = None
    steps: int = 0


@dataclass(frozen=True)
class Search:
    """What was found: `largest` fits (0: not even 1 does), `next` is the trial of one more, None beyond `most`.

    `tried` has the last trial of each number, in the order in which they were first tried.
    """

    largest: int
    tried: tuple[Trial, ...]
    next: Trial | None


Attempt = Callable[[int], Trial]


def search(attempt: Attempt, capacity_bytes: int, *, first: int, most: int, power: int = 1,
           confirm: Attempt | None = None) -> Search:
    """Find n such that n fits and n + 1 does not, both tried, or n = `most`.

    Args:
        attempt: runs one number and says how it went.
        capacity_bytes: what may be reserved.
        first: where to start, from 1 to `most`.
        power: 1 if memory grows with the number, 2 if with its square too (the length of a sequence).
        confirm: a longer run, for the boundary alone: where it fails, the boundary is lower.

    Each trial that fits tells how fast reserved memory grows, hence where it meets the capacity; that is tried next.
    """
    trials: dict[int, Trial] = {}
    low, high, stride, number = 0, most + 1, 1, first
    while high - low > 1:
        trials[number] = trial = attempt(number)
        low, high = (number, high) if trial.fits else (low, number)
        guess = _estimate([t for t in trials.values() if t.fits], capacity_bytes, power)
        patient = len(trials) < _PATIENCE or high - low <= 2 * stride
        if guess is None or not patient and high <= most:
            number = (low + high) // 2
        elif low < guess < high and patient:
            number = guess
        else:  # the estimate is behind us: look just beyond, then farther
            number = max(high - stride, low + 1) if guess >= high else min(low + stride, high - 1)
            stride *= 2
    if confirm is not None:
        low, high = _confirmed(confirm, trials, low, high)
    return Search(low, tuple(trials.values()), trials.get(high))


def _confirmed(confirm: Attempt, trials: dict[int, Trial], number: int, high: int) -> tuple[int, int]:
    """n that was confirmed, and n + 1 that failed: from `number` down in growing strides, then by halves."""
    low, stride = 0, 1
    while high - low > 1:
        trials[number] = trial = confirm(number)
        low, high = (number, high) if trial.fits else (low, number)
        number = (low + high) // 2 if low else max(high - stride, 1)
        stride *= 2
    return low, high


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
