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
RECOMPUTE = "recompute"
RESIDUAL = "residual"
_OWNERS = tuple(c for c in Category if c is not Category.OUTSIDE)
_COLUMN = {category: i for i, category in enumerate(_OWNERS)}
_BY_VALUE = {category.value: category for category in Category}

_TENSORS_OF_KERNELS = {"softmax backward: grad * output", "embedding: contiguous indices"}  # names of scratch.py

# A recording has no name for what a kernel or library takes besides its outputs; it has no shape either.
_PRODUCTS = {"aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"}
_LASTING_WORKSPACES = {8_519_680, 33_554_432, 1_048_576}  # cuBLAS before and from Hopper, cuBLASLt: scratch.py
_SCRATCH_TAKERS = {"aten.sum", "aten.mean", "aten.embedding_dense_backward", "aten._cudnn_attention_forward",
                   "aten._cudnn_attention_backward"}


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


def owned(trace: Trace) -> Trace:
    """The trace with the owner of each block written to its allocation, as a category."""
    events = list(trace.events)
    for block, category in zip(blocks := trace.blocks(), _categorise(trace, blocks), strict=True):
        events[block.born] = block.event._replace(category=category.value)
    return Trace(events, trace.marks, trace.stacks, trace.meta)


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

    phase: list[str]  # at each event; a recomputation belongs to the phase it happens in
    phase_run: list[int]  # number of the stretch of one such phase that each event is in
    run: list[int]  # the same with recomputations as stretches of their own
    module_run: list[int]  # number of the stretch of one module
    vocabulary: int  # 0 if unknown
    logits: int  # elements of all logits, 0 if unknown
    parameter_shapes: frozenset[tuple[int, ...]]
    parameter_bytes: frozenset[int]


def _categorise(trace: Trace, blocks: list[Block]) -> list[Category]:
    facts = _facts(trace)
    return [_claimed(block.event) or _rule(block, facts) for block in blocks]


def _claimed(event: Event) -> Category | None:
    """What the event carries. A tensor that a kernel makes for itself is no library's workspace, but a temporary."""
    return Category.TEMPORARIES if event.operator in _TENSORS_OF_KERNELS else _BY_VALUE.get(event.category)


def _facts(trace: Trace) -> _Facts:
    events = trace.events
    vocabulary = trace.meta.get("vocabulary") or next(
        (e.shape[-1] for e in events if e.operator.startswith("aten._log_softmax") and e.shape), 0)
    parameters = [e for e in events if e.category == Category.PARAMETERS.value]
    steps = [e.step for e in events]
    phases = list(accumulate((e.phase for e in events), lambda now, new: now if new == RECOMPUTE else new))
    # A free carries no module: it belongs to the stretch of the allocation before it.
    modules = list(accumulate((e.module if e.action == "alloc" else None for e in events),
                              lambda now, new: now if new is None else new))
    return _Facts(
        phases, _stretches(list(zip(steps, phases, strict=True))), _stretches([(e.step, e.phase) for e in events]),
        _stretches(modules), vocabulary, vocabulary * trace.meta.get("tokens", 0),
        frozenset(_bare(e.shape) for e in parameters if e.shape), frozenset(e.requested_bytes for e in parameters))


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
    event, phase = block.event, facts.phase[block.born]
    outlives = _outlives(block, facts.phase_run)
    if _is_workspace(block, outlives):
        return Category.WORKSPACE
    if phase in SETUP:
        return _of_setup(event, outlives)
    if _is_logits(event, facts):
        return Category.LOSS
    if event.phase == RECOMPUTE and phase != "forward":
        return Category.ACTIVATIONS if _outlives(block, facts.run) else Category.TEMPORARIES
    if phase == "forward":
        return Category.ACTIVATIONS if outlives else Category.TEMPORARIES
    if phase == "backward":
        return Category.GRADIENTS if _is_gradient(block, outlives, facts) else Category.TEMPORARIES
    if phase == "optimizer" and outlives:
        return Category.OPTIMIZER
    return Category.INPUTS if outlives and not phase else Category.TEMPORARIES


def _outlives(block: Block, runs: list[int]) -> bool:
    return block.died is None or runs[block.died] != runs[block.born]


def _of_setup(event: Event, outlives: bool) -> Category:
    """Before the first step. A model that has never run has claimed nothing: what moved it made its parameters."""
    if not outlives:
        return Category.TEMPORARIES
    return Category.PARAMETERS if event.phase == "model" else Category.INPUTS


def _is_logits(event: Event, facts: _Facts) -> bool:
    """Rows of the vocabulary's width, all or a chunk of them; without a shape, the bytes of all in 16 or 32 bits."""
    if not event.shape:
        return facts.logits > 0 and event.requested_bytes in (2 * facts.logits, 4 * facts.logits)
    return len(event.shape) > 1 and event.shape[-1] == facts.vocabulary < prod(event.shape)


def _is_workspace(block: Block, outlives: bool) -> bool:
    """Taken by a product of matrices and never given back, in a size that libraries take; or scratch of a kernel."""
    event = block.event
    if event.shape:
        return False
    if event.operator in _PRODUCTS:
        return block.died is None and event.requested_bytes in _LASTING_WORKSPACES
    return event.operator in _SCRATCH_TAKERS and not outlives


def _is_gradient(block: Block, outlives: bool, facts: _Facts) -> bool:
    """Made in backward, as large as a parameter, and alive beyond backward, or at least beyond the module at work: so
    the head's half of a tied gradient counts, which waits for the embedding's half."""
    event = block.event
    if not facts.parameter_bytes:
        return outlives
    if event.shape and facts.parameter_shapes:
        fits = _bare(event.shape) in facts.parameter_shapes
    else:
        fits = event.requested_bytes in facts.parameter_bytes
    return fits and (outlives or _outlives(block, facts.module_run))
