"""The same run once more, watched event by event: from inside, while it stands still."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from gpt2.memory.simulator import SimulatedGpu, collect_garbage
from gpt2.memory.trace import Trace

Program = Callable[[SimulatedGpu], object]


class _Seen(BaseException):
    """Ends a run: what was to be seen has been seen."""


def run(program: Program, card: SimulatedGpu, each: Callable[[int], None] | None = None) -> Trace:
    """One run; `each` is called with the number of every event when it has happened.

    What is older than the run is frozen meanwhile: no tensor of this card is among it, so that looking for those, and
    the collector, are quick.
    """
    collect_garbage()
    gc.freeze()
    record, events = card.allocator.record, card.events

    def and_tell(*event) -> None:
        record(*event)
        each(len(events) - 1)

    if each is not None:
        card.allocator.record = and_tell
    try:
        with card:
            kept = program(card)
            trace = card.trace()
            del kept
            return trace
    except (_Seen, torch.OutOfMemoryError):
        return card.trace()
    finally:
        gc.unfreeze()


def again(program: Program, card: SimulatedGpu, trace: Trace, last: int, each: Callable[[int], None]) -> None:
    """A run like that of `trace`, up to its event `last`; ValueError if it is another."""
    wrong: list[str] = []
    seen: list[int] = []

    def and_compare(i: int) -> None:
        if wrong or seen:  # what a free raises is lost: it runs in a destructor
            if card.events[i].action == "alloc":
                raise _Seen
            return
        now, then = card.events[i], trace.events[i]
        if "alloc" in (now.action, then.action) and (now.action, now.requested_bytes, now.address) != (
                then.action, then.requested_bytes, then.address):
            wrong.append(f"event {i} was {then.action} of {then.requested_bytes:,} B, and is {now.action} of "
                         f"{now.requested_bytes:,} B")
            return
        each(i)
        if i == last:
            seen.append(i)

    run(program, card, and_compare)
    if wrong or not seen:
        raise ValueError("the program took another course the second time: "
                         + (wrong[0] if wrong else f"it ended before event {last}"))
