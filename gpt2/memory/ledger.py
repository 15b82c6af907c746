"""Who owns each byte, at every moment of a trace.

Each block gets one `Category`: the one that its event carries (claimed by address, or a library's), or else what its
phase, shape and life say. What a block is larger than its request is `Category.SLACK`. The categories of all live
blocks sum to `memory_allocated()`; what they do not explain is shown as residual, and it is 0.

Known limitation: a block older than the trace is not in it. If the trace has marks, such bytes are the residual.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import pandas as pd

from gpt2.memory.trace import Block, Category, Event, Trace

MIB = 2**20
SETUP = ("warmup", "model", "optimizer init", "batch")
RESIDUAL = "residual"
_OWNERS = tuple(c for c in Category if c is not Category.OUTSIDE)
_COLUMN = {category: i for i, category in enumerate(_OWNERS)}
_BY_VALUE = {category.value: category for category in Category}


class Peak(NamedTuple):
    """The request that took `memory_allocated()` to its highest."""

    index: int  # of the event
    allocated_bytes: int
    step: int
    phase: str
    module: str
    operator: str
    requested_bytes: int
    shape: tuple[int, ...]
    dtype: str
    category: str


class Ledger:
    """Owners of the blocks of one trace. Computed once; every question afterwards is quick."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.blocks = trace.blocks()
        self.categories = _categorise(trace, self.blocks)

    def at(self, index: int) -> pd.DataFrame:
        """Who owns what after event `index`: category, allocated_bytes, share_ratio; last the residual.

        The rows sum to `memory_allocated()` at that moment. Raises IndexError if there is no such event.
        """
        if not 0 <= index < len(self.trace):
            raise IndexError(f"event {index} of a trace of {len(self.trace)}")
        owned = self._owned[index]
        total = int(self._allocated[index])
        rows = [*owned.tolist(), total - int(owned.sum())]
        names = [*(c.value for c in _OWNERS), RESIDUAL]
        shares = [n / total if total else 0.0 for n in rows]
        return pd.DataFrame({"category": names, "allocated_bytes": rows, "share_ratio": shares})

    def timeline(self, steps=None) -> pd.DataFrame:
        """Bytes of each category after each event of `steps` (default: all): a row per event, a column per category.

        Besides the categories, by their values: step, phase, allocated_bytes, residual_bytes. The index is the event's.
        """
        chosen = np.arange(len(self.trace)) if steps is None else np.flatnonzero(np.isin(self._steps, list(steps)))
        names, index = [c.value for c in _OWNERS], pd.Index(chosen, name="event")
        table = pd.DataFrame(self._owned[chosen], columns=names, index=index)
        table.insert(0, "step", self._steps[chosen])
        table.insert(1, "phase", [self.trace.events[i].phase for i in chosen])
        table["allocated_bytes"] = self._allocated[chosen]
        table["residual_bytes"] = self._allocated[chosen] - self._owned[chosen].sum(axis=1)
        return table

    def entries(self, index: int, count: int | None = 20) -> pd.DataFrame:
        """The `count` biggest blocks alive after event `index` (None: all), largest first, with who made each and why.

        Columns: category, module, operator, shape, dtype, step, phase, requested_bytes, allocated_bytes, size_mib.
        """
        alive = [n for n, b in enumerate(self.blocks) if b.born <= index and (b.died is None or b.died > index)]
        alive.sort(key=lambda n: (-self.blocks[n].event.block_bytes, self.blocks[n].born))
        rows = []
        for n in alive[:count]:
            e = self.blocks[n].event
            rows.append((self.categories[n].value, e.module, e.operator, e.shape, e.dtype, e.step, e.phase,
                         e.requested_bytes, e.block_bytes, e.block_bytes / MIB))
        return pd.DataFrame(rows, columns=["category", "module", "operator", "shape", "dtype", "step", "phase",
                                           "requested_bytes", "allocated_bytes", "size_mib"])

    def peak_owner(self, steps=None) -> Peak:
        """The request that set the peak of `steps` (default: all). Raises ValueError if they have no events."""
        index = self.trace.peak(steps)
        e = self.trace.events[index]
        owner = next((self.categories[n].value for n, b in enumerate(self.blocks) if b.born == index), "")
        return Peak(index, int(self._allocated[index]), e.step, e.phase, e.module, e.operator, e.requested_bytes,
                    e.shape, e.dtype, owner)

    def unexplained(self) -> pd.DataFrame:
        """At each mark what the allocator's own counter said, beside the sum over owners: an independent check.

        Columns: name, step, allocated_bytes, owned_bytes, residual_bytes.
        """
        rows = [(m.name, m.step, m.allocated_bytes, int(self._owned[m.event_count - 1].sum()) if m.event_count else 0)
                for m in self.trace.marks]
        table = pd.DataFrame(rows, columns=["name", "step", "allocated_bytes", "owned_bytes"])
        table["residual_bytes"] = table["allocated_bytes"] - table["owned_bytes"]
        return table

    @cached_property
    def _steps(self) -> np.ndarray:
        return np.array([e.step for e in self.trace.events], dtype=np.int64)

    @cached_property
    def _allocated(self) -> np.ndarray:
        """`memory_allocated()` after each event; what is older than the trace is known from its first mark."""
        running = np.array(self.trace.allocated_bytes(), dtype=np.int64)
        mark = next((m for m in self.trace.marks if m.event_count), None)
        return running if mark is None else running + (mark.allocated_bytes - running[mark.event_count - 1])

    @cached_property
    def _owned(self) -> np.ndarray:
        """Bytes of each owner (column) after each event (row)."""
        change = np.zeros((len(self.trace), len(_OWNERS)), dtype=np.int64)
        slack = _COLUMN[Category.SLACK]
        for block, category in zip(self.blocks, self.categories, strict=True):
            event, column = block.event, _COLUMN[category]
            over = event.block_bytes - event.requested_bytes
            change[block.born, column] += event.requested_bytes
            change[block.born, slack] += over
            if block.died is not None:
                change[block.died, column] -= event.requested_bytes
                change[block.died, slack] -= over
        return change.cumsum(axis=0)


def categorise(trace: Trace) -> list[Category]:
    """The owner of each block of `trace.blocks()`, in that order."""
    return _categorise(trace, trace.blocks())


def at(trace: Trace, index: int) -> pd.DataFrame:
    """`Ledger.at` for a single question."""
    return Ledger(trace).at(index)


def timeline(trace: Trace, steps=None) -> pd.DataFrame:
    """`Ledger.timeline` for a single question."""
    return Ledger(trace).timeline(steps)


def entries(trace: Trace, index: int, count: int | None = 20) -> pd.DataFrame:
    """`Ledger.entries` for a single question."""
    return Ledger(trace).entries(index, count)


def peak_owner(trace: Trace, steps=None) -> Peak:
    """`Ledger.peak_owner` for a single question."""
    return Ledger(trace).peak_owner(steps)


# --- whose a block is ---------------------------------------------------------------------------------------------


class _Facts(NamedTuple):
    """What the rules need to know of the trace as a whole."""

    run: list[int]  # number of the stretch of one phase that each event is in
    module_run: list[int]  # and of the stretch of one module
    vocabulary: int  # 0 if unknown
    parameter_shapes: frozenset[tuple[int, ...]]


def _categorise(trace: Trace, blocks: list[Block]) -> list[Category]:
    facts = _facts(trace)
    return [_BY_VALUE.get(block.event.category) or _rule(block, facts) for block in blocks]


def _facts(trace: Trace) -> _Facts:
    events = trace.events
    vocabulary = trace.meta.get("vocabulary") or next(
        (e.shape[-1] for e in events if e.operator.startswith("aten._log_softmax") and e.shape), 0)
    shapes = frozenset(_bare(e.shape) for e in events if e.category == Category.PARAMETERS.value and e.shape)
    modules = [e for e in events if e.action == "alloc"]  # frees carry no module
    names = iter(_stretches([e.module for e in modules]))
    module_run, current = [], 0
    for event in events:
        current = next(names) if event.action == "alloc" else current
        module_run.append(current)
    return _Facts(_stretches([(e.step, e.phase) for e in events]), module_run, vocabulary, shapes)


def _stretches(labels: list) -> list[int]:
    """A number for each label that grows by one wherever the label changes."""
    return list(accumulate((a != b for a, b in pairwise(labels)), initial=0)) if labels else []


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading ones: a bias's gradient is made as (1, N)."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return tuple(shape)


def _rule(block: Block, facts: _Facts) -> Category:
    """The owner of a block that nobody claimed."""
    event = block.event
    outlives = block.died is None or facts.run[block.died] != facts.run[block.born]
    if event.phase in SETUP:
        return _of_setup(event, outlives)
    if facts.vocabulary and len(event.shape) > 1 and event.shape[-1] == facts.vocabulary < prod(event.shape):
        return Category.LOSS
    if event.phase in ("forward", "recompute"):
        return Category.ACTIVATIONS if outlives else Category.TEMPORARIES
    if event.phase == "backward":
        return Category.GRADIENTS if _is_gradient(block, outlives, facts) else Category.TEMPORARIES
    if event.phase == "optimizer" and outlives:
        return Category.OPTIMIZER
    return Category.INPUTS if outlives and not event.phase else Category.TEMPORARIES


def _of_setup(event: Event, outlives: bool) -> Category:
    """Before the first step. A model that has never run has claimed nothing: what moved it made its parameters."""
    if not outlives:
        return Category.TEMPORARIES
    return Category.PARAMETERS if event.phase == "model" else Category.INPUTS


def _is_gradient(block: Block, outlives: bool, facts: _Facts) -> bool:
    """Made in backward, shaped like a parameter, and alive beyond backward, or at least beyond the module at work: so
    the head's half of a tied gradient counts, which waits for the embedding's half."""
    if not facts.parameter_shapes or _bare(block.event.shape) not in facts.parameter_shapes:
        return outlives and not facts.parameter_shapes
    return outlives or facts.module_run[block.died] != facts.module_run[block.born]
