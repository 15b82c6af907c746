"""A walk through one step: what every allocator event did, in words and bytes, and the moments worth stopping at.

Pure data, made once from a trace; the live widget and the exported page both read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from gpt2.memory.ledger import Ledger
from gpt2.memory.trace import Category, Mark, Trace
from gpt2.study.figures.drawing import conditions
from gpt2.study.figures.step import blind_spot, window
from gpt2.study.palette import mib

BUTTONS = ("forward", "loss", "backward", "peak", "optimizer", "zero_grad")
SAID = {"alloc": "asked for", "free": "freed", "free_requested": "freed, still in use on another stream",
         "free_completed": "back in the pool", "segment_alloc": "new segment from the driver:",
         "segment_free": "segment given back to the driver:", "segment_map": "pages mapped by the driver:",
         "segment_unmap": "pages given back to the driver:", "oom": "out of memory, asked for"}


@dataclass(frozen=True)
class Walk:
    """One step of a trace, event by event. Indices count from 0 at the step's first event."""

    trace: Trace
    first: int  # the step's first event in the trace
    stacks: np.ndarray  # (events, categories): bytes after each event
    categories: tuple[Category, ...]
    blocks: dict[int, tuple]  # event -> (Event of the block's birth, its category), for allocs and frees
    readings: tuple[int, ...]  # events after which hooks or lines read the counter
    reading_names: tuple[str, ...]
    moments: dict[str, int]
    blind: tuple[int, int]  # the events between the readings around the peak
    about: str

    def __len__(self) -> int:
        return len(self.stacks)

    @cached_property
    def totals(self) -> list[int]:
        """Allocated bytes after each event."""
        return self.stacks.sum(axis=1).tolist()

    @cached_property
    def highest_reading(self) -> int:
        return max(self.totals[i] for i in self.readings)

    @property
    def peak(self) -> int:
        return self.moments["peak"]

    def event(self, i: int):
        """Event `i` of the step."""
        return self.trace.events[self.first + i]

    def words(self, i: int) -> tuple[str, str, str]:
        """Where we are, what happened, and for whom."""
        event, (birth, category) = self.event(i), self.blocks.get(i, (None, None))
        where = f"event {i + 1:,} of {len(self):,} · {event.phase or 'between'}"
        here = [n for n, at in enumerate(self.readings) if at == i]
        if here:
            count = "–".join(f"{n + 1}" for n in sorted({here[0], here[-1]}))
            where += f" · reading {count} of {len(self.readings)}: {', '.join(self.reading_names[n] for n in here)}"
        what = f"{SAID[event.action]} {mib(event.block_bytes, 3 if event.block_bytes < 2**20 else 1)}"
        if birth is None:
            return where, what, event.operator.removeprefix("aten.")
        shape = "×".join(f"{n:,}" for n in birth.shape)
        who = " · ".join(word for word in (birth.operator.removeprefix("aten."), birth.module, shape, birth.dtype,
                                           category.value) if word)
        return where, what, who

    def frames(self, every: bool) -> list[int]:
        """The stops of the slider: every event, or the readings and the moments between them."""
        return list(range(len(self))) if every else sorted({*self.readings, *self.moments.values()})


def walk_of(trace: Trace, *, step: int = 2, readings: Sequence[Mark] | None = None, recipe: str = "") -> Walk:
    """The walk through a step; `readings` default to all marks of the step. ValueError if there is no such step."""
    first, past = window(trace, step)
    ledger = Ledger(trace)
    table = ledger.timeline([step]).loc[first:past - 1]
    categories = tuple(category for category in Category if category.value in table)
    marks = [mark for mark in (readings if readings is not None else trace.marks) if mark.step == step]
    marks = [mark for mark in marks if first < mark.event_count <= past]
    lives = {}
    for block, category in zip(ledger.blocks, ledger.categories, strict=True):
        for at in (block.born, block.died):
            if at is not None and first <= at < past:
                lives[at - first] = (block.event, category)
    start, end = blind_spot(trace, marks, step)
    return Walk(trace, first, table[[category.value for category in categories]].to_numpy(), categories, lives,
                tuple(mark.event_count - 1 - first for mark in marks), tuple(mark.name for mark in marks),
                _moments(trace, table, step), (start - first, end - first), conditions(trace, recipe))


def _moments(trace: Trace, table: pd.DataFrame, step: int) -> dict[str, int]:
    """The first event of each named moment; the loss begins with the first vocabulary-sized tensor."""
    first, found = table.index[0], {}
    for index, phase in table["phase"].items():
        found.setdefault(phase, index - first)
    loss = table.index[table[Category.LOSS.value] > 0]
    found |= {"peak": trace.peak({step}) - first} | ({"loss": loss[0] - first} if len(loss) else {})
    return {name: int(found[name]) for name in BUTTONS if name in found}
