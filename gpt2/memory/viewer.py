"""Write a trace as a snapshot that pytorch.org/memory_viz opens.

The viewer reads pickles of protocols 2 to 4 made of plain data, and replays the history backwards from the segments at
the end: both must agree (torch/utils/viz/MemoryViz.js). It colours by category where entries have one, and breaks
where none is called "unknown", so the last entry is. Keys it does not know it ignores: phase, step, module and operator
travel in them, and `snapshot.to_trace` finds them again, as it does what marks a prediction.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from gpt2.memory.caching.blocks import LARGE_SEGMENT_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, STATE_NAMES
from gpt2.memory.reading.history import BEFORE
from gpt2.memory.reading.layout import Layout, Segment, layout_at
from gpt2.memory.trace import Event, Trace

_INACTIVE, _ALLOCATED, _PENDING = STATE_NAMES[:3]
PROTOCOL = 4
SIMULATED = "simulated"  # a key of the snapshot of a prediction
ABOUT = {"gpu": str, "torch": str, "capacity_bytes": int, "limit_bytes": int}  # what of its meta travels there


def write(trace: Trace, path: str | Path) -> None:
    """Write `to_snapshot(trace)`, whole or not at all."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    temporary.write_bytes(pickle.dumps(to_snapshot(trace), protocol=PROTOCOL))
    temporary.replace(path)


def to_snapshot(trace: Trace) -> dict:
    """The dict that `torch.cuda.memory._snapshot` would give after this trace, for device 0."""
    from gpt2.memory.ledger import owned  # pandas, only where a snapshot is written

    frames = _Frames(trace)
    trace = owned(trace)  # the viewer colours by it
    entries: list[dict] = []
    for event in trace.events:
        if event.phase != BEFORE:  # the viewer works out for itself what was there
            entries += _entries(event, frames, len(entries))
    layout = layout_at(trace, len(trace) - 1)
    entries.append({"action": "snapshot", "addr": 0, "size": layout.allocated_bytes, "stream": 0,
                    "time_us": len(entries), "frames": [], "category": "unknown"})
    conf = str(trace.meta.get("allocator_conf") or "")
    return {"segments": _segments(trace, layout, frames), "device_traces": [entries],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": conf, "max_split_size": -1,
                                   "garbage_collection_threshold": 0.0,
                                   "expandable_segments": "expandable_segments:True" in conf},
            "external_annotations": [], **_mark(trace)}


def _mark(trace: Trace) -> dict:
    """What says that a file is a prediction, and of which card."""
    if trace.meta.get("kind") != "predicted":
        return {}
    return {SIMULATED: {key: trace.meta[key] for key in ABOUT if trace.meta.get(key) is not None}}


class _Frames:
    """Lists of frames, one list for each stack. An event without a stack shows its operator and module."""

    def __init__(self, trace: Trace):
        self._stacks = [[{"filename": f.file, "line": f.line, "name": f.name} for f in stack] for stack in trace.stacks]
        self._labels: dict[tuple[str, str, str], list[dict]] = {}
        self._none: list[dict] = []

    def of(self, event: Event) -> list[dict]:
        if event.stack >= 0:
            return self._stacks[event.stack]
        if not event.operator:
            return self._none
        key = (event.module, event.phase, event.operator)
        if key not in self._labels:
            self._labels[key] = [{"filename": event.module or event.phase, "line": 0, "name": event.operator}]
        return self._labels[key]


def _entries(event: Event, frames: _Frames, time: int) -> list[dict]:
    """One entry, two for a free that took effect at once."""
    where = "device_free" if event.action == "oom" else "addr"
    moves = event.action in ("alloc", "free", "free_requested", "free_completed")
    size = event.requested_bytes if moves or event.action == "oom" else event.block_bytes
    actions = ("free_requested", "free_completed") if event.action == "free" else (event.action,)
    category = {"category": event.category} if event.category else {}
    return [{"action": action, where: event.address, "size": size, "stream": event.stream, "time_us": time + n,
             "frames": frames.of(event), **category, "step": event.step, "phase": event.phase, "module": event.module,
             "operator": event.operator} for n, action in enumerate(actions)]


def _segments(trace: Trace, layout: Layout, frames: _Frames) -> list[dict]:
    live: dict[int, Event] = {}
    pending: set[int] = set()
    for event in trace.events:
        if event.action == "alloc":
            live[event.address] = event
            pending.discard(event.address)
        elif event.action == "free_requested":
            pending.add(event.address)
    return [_segment(segment, [_block(piece, live, pending, frames) for piece in pieces])
            for segment, pieces in layout.pieces()]


def _block(piece: tuple[int, int, bool], live: dict[int, Event], pending: set[int], frames: _Frames) -> dict:
    address, size, used = piece
    event = live[address] if used else None
    state = _INACTIVE if event is None else _PENDING if address in pending else _ALLOCATED
    return {"address": address, "size": size, "requested_size": event.requested_bytes if event else 0, "state": state,
            "frames": frames.of(event) if event else []}


def _segment(segment: Segment, blocks: list[dict]) -> dict:
    active = [b for b in blocks if b["state"] != _INACTIVE]
    small = segment.size <= SMALL_SEGMENT_BYTES if not segment.expandable else (
        all(b["size"] <= SMALL_BYTES for b in active) and (active or segment.size % LARGE_SEGMENT_BYTES))
    return {"device": 0, "address": segment.address, "total_size": segment.size, "stream": segment.stream,
            "allocated_size": sum(b["size"] for b in active if b["state"] == _ALLOCATED),
            "active_size": sum(b["size"] for b in active),
            "requested_size": sum(b["requested_size"] for b in active),
            "segment_type": "small" if small else "large", "segment_pool_id": (0, 0),
            "is_expandable": segment.expandable, "frames": [], "blocks": blocks}
