"""Somebody's memory snapshot: from the file to a trace.

    trace = to_trace(read("snapshot.pickle"))

`torch.cuda.memory._dump_snapshot` writes the last N allocator events and the segments as they are at the end. The
events say what was asked and where, not how big the blocks were, nor what was there before the first of them. Both
follow: walking back from the end gives the memory at the beginning, and from there the allocator's split rule gives
each block its size. Format: torch/csrc/cuda/Module.cpp and torch/cuda/_memory_viz.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpt2.memory.reading import infer
from gpt2.memory.reading.history import Entry, History, Known
from gpt2.memory.reading.layout import Layout, Segment
from gpt2.memory.reading.safe_pickle import DEFAULT, Limits, SnapshotError, loads
from gpt2.memory.trace import Category, Frame, Trace
from gpt2.memory.viewer import ABOUT, SIMULATED, to_snapshot

LABELS = ("step", "phase", "module", "operator", "category")  # what `viewer` adds to an entry
_CATEGORIES = {category.value for category in Category}
_MOST_SEGMENTS = 200_000  # 400 GB in the smallest segments there are
_MOST_FRAMES = 4096
_SEGMENT_ACTIONS = ("segment_alloc", "segment_map", "segment_free", "segment_unmap")
_ACTIONS = ("alloc", "free_requested", "free_completed", "oom", *_SEGMENT_ACTIONS)
_ACTIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")
_UINT64 = 2**64


def read(path: str | Path, limits: Limits = DEFAULT) -> dict:
    """The dict in a snapshot file, read without running anything in it.

    Raises SnapshotError (a ValueError), in one line that begins with the path, if it is no snapshot or not plain data,
    and OSError if there is no such file.
    """
    try:
        if (size := Path(path).stat().st_size) > limits.file_bytes:
            raise SnapshotError(f"the file has {size:,} bytes; at most {limits.file_bytes:,} are read")
        snapshot = loads(Path(path).read_bytes(), limits)
        if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= snapshot.keys():
            raise SnapshotError("not a memory snapshot: a dict with 'segments' and 'device_traces' is expected")
        return snapshot
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from None


def devices(snapshot: Mapping) -> list[int]:
    """The devices with a history or with segments."""
    traced = {i for i, entries in enumerate(_list(snapshot, "device_traces")) if entries}
    return sorted(traced | {_int(s, "device", 0) for s in _list(snapshot, "segments") if isinstance(s, dict)})


def to_trace(snapshot: Mapping, device: int | None = None, parameters: Mapping[int, str] | None = None) -> Trace:
    """The history of one device (default: the first that has one) as a Trace.

    What was there before it begins is given as allocations of the phase `history.BEFORE`. Phase, step and category are
    inferred from stacks and lifetimes (`infer`). `parameters` names blocks by address (`p.data_ptr()`), where somebody
    knows them. meta["warnings"] says what had to be guessed: a ring that wrapped, blocks whose size is not certain.
    Raises SnapshotError for a device that is not there, or an entry that makes no sense.
    """
    there = devices(snapshot)
    device = (there[0] if there else 0) if device is None else device
    if device not in there:
        raise SnapshotError(f"device {_shown(device)} is not in the snapshot; it has {there or 'none'}")
    stacks, warnings = _Stacks(), []
    traces = _list(snapshot, "device_traces")
    entries = _entries(traces[device] if device < len(traces) else [], stacks, warnings)
    segments, final = _segments(_list(snapshot, "segments"), device, stacks)
    settings = snapshot.get("allocator_settings")
    settings = settings if isinstance(settings, dict) else {}
    overflowed = settings.get("trace_alloc_overflowed") is True  # newer torch says so itself
    history = History(entries, segments, final, _empty_layout(settings), warnings,
                      "the snapshot says so" if overflowed else "")
    conf = settings.get("PYTORCH_CUDA_ALLOC_CONF")
    trace = Trace(history.events(), [], stacks.list, {
        **_origin(snapshot), "source": "memory snapshot", "device": device,
        "allocator_conf": conf if isinstance(conf, str) and len(conf) < 1000 else "", "warnings": warnings})
    return infer.label(trace, parameters or {})


def from_simulation(card) -> dict:
    """What `torch.cuda.memory._snapshot()` gives inside a SimulatedGpu: device 0, its segments, and its events if
    `_record_memory_history` was called. The events then go back to the beginning, and carry our labels besides."""
    snapshot = to_snapshot(card.trace())
    if not card.history:
        snapshot["device_traces"] = [[]]
    return snapshot


def _origin(snapshot: Mapping) -> dict:
    """Measured, or a prediction of ours that says of which card."""
    if SIMULATED not in snapshot:
        return {"kind": "measured"}
    said = snapshot[SIMULATED]
    if not isinstance(said, dict):
        raise SnapshotError(f"{SIMULATED!r} is not ours: {_shown(said)}")
    about = {key: said.get(key) for key in ABOUT}
    for key, value in about.items():
        fits = type(value) is ABOUT[key] and (len(value) < 100 if isinstance(value, str) else 0 <= value < _UINT64)
        if value is not None and not fits:
            raise SnapshotError(f"{SIMULATED!r} has no sensible {key!r}: {_shown(value)}")
    return {"kind": "predicted", **about, "gpu": about["gpu"] or "", "torch": about["torch"] or ""}


class _Stacks:
    """Python stacks, each once. A snapshot shares equal stacks, so identity is tried first."""

    def __init__(self):
        self.list: list[tuple[Frame, ...]] = []
        self._by_identity: dict[int, int] = {}
        self._by_value: dict[tuple, int] = {}

    def add(self, frames: object) -> int:
        if not frames:
            return -1
        if (known := self._by_identity.get(id(frames))) is not None:
            return known
        if not isinstance(frames, list) or len(frames) > _MOST_FRAMES:
            raise SnapshotError("a stack is not a list of frames, or a very long one")
        stack = tuple(Frame(_str(f, "filename"), _int(f, "line", 0), _str(f, "name")) for f in frames)
        index = self._by_value.setdefault(stack, len(self.list))
        if index == len(self.list):
            self.list.append(stack)
        self._by_identity[id(frames)] = index
        return index


def _entries(raw: object, stacks: _Stacks, warnings: list[str]) -> list[Entry]:
    entries, skipped = [], {}
    for item in _distinct(raw, "history"):
        action = _str(item, "action")
        if action in _ACTIONS:
            where = "device_free" if action == "oom" and "device_free" in item else "addr"
            entries.append(Entry(action, _int(item, where), _int(item, "size"), _int(item, "stream", 0),
                                 stacks.add(item.get("frames")), _labels(item) if "phase" in item else ()))
        elif action != "snapshot":
            skipped[action] = skipped.get(action, 0) + 1
    if skipped:
        warnings.append("entries of kinds that move no memory were left out: "
                        + ", ".join(f"{n} {_shown(kind)}" for kind, n in sorted(skipped.items())[:5]))
    return entries


def _labels(item: dict) -> tuple:
    step, *words = (item.get(name, "") for name in LABELS)
    if not isinstance(step, int) or not all(isinstance(word, str) and len(word) < 500 for word in words):
        raise SnapshotError("an entry has labels that are not ours")
    if words[-1] not in _CATEGORIES:
        words[-1] = ""
    return max(0, min(step, 2**31)), *words


def _segments(raw: list, device: int, stacks: _Stacks) -> tuple[list[Segment], dict[int, Known]]:
    """Segments at the end, and the blocks in use in them by address."""
    segments, blocks = [], {}
    _distinct([item.get("blocks") for item in _distinct(raw, "segments") if isinstance(item, dict)], "blocks")
    for item in raw:
        if _int(item, "device", 0) != device:
            continue
        address, size, stream = _int(item, "address"), _int(item, "total_size"), _int(item, "stream", 0)
        segments.append(Segment(address, size, stream, bool(item.get("is_expandable"))))
        if len(segments) > _MOST_SEGMENTS:
            raise SnapshotError(f"more than {_MOST_SEGMENTS:,} segments")
        end = address + size
        for block in _distinct(_list(item, "blocks"), "blocks"):
            width = _int(block, "size")
            if width == 0 or address + width > end:
                raise SnapshotError("the blocks of a segment do not add up to it")
            if _str(block, "state") in _ACTIVE:
                blocks[address] = _known(block, width, stream, stacks)
            address += width
    return segments, blocks


def _known(block: dict, size: int, stream: int, stacks: _Stacks) -> Known:
    """torch 1.x kept a block's request and stack in its 'history'."""
    past = block.get("history")
    source = past[0] if isinstance(past, list) and past and isinstance(past[0], dict) else block
    requested = _int(source, "real_size" if source is not block else "requested_size", size)
    return Known(size, requested, stream, stacks.add(source.get("frames")), block["state"] != "active_allocated")


def _empty_layout(settings: dict) -> Layout:
    """With the rounding and splitting that the run had."""
    split = settings.get("max_split_size", -1)
    rounding = settings.get("roundup_power2_divisions")
    values = list(rounding.values())[:16] if isinstance(rounding, dict) else []
    if len(values) != 16 or not all(isinstance(v, int) and 0 <= v <= 2**20 for v in values):
        values = [0] * 16
    return Layout(tuple(values), split if isinstance(split, int) and split > 0 else 2**63)


def _distinct(items: object, what: str) -> list:
    """A list in which nothing stands twice: a pickle repeats a value for two bytes, and a small file could be huge."""
    if not isinstance(items, list):
        raise SnapshotError(f"the {what} are not a list")
    if len({*map(id, items)}) != len(items):
        raise SnapshotError(f"the {what} hold the same entry more than once: not a memory snapshot")
    return items


def _shown(value: object) -> str:
    """A value in an error message: short, on one line."""
    if isinstance(value, str):
        return repr(value[:40])
    small = isinstance(value, float) or isinstance(value, int) and value.bit_length() < 128
    return repr(value) if small or value is None else f"a {type(value).__name__}"


def _list(mapping: object, key: str) -> list:
    value = mapping.get(key) if isinstance(mapping, Mapping) else None
    if not isinstance(value, list):
        raise SnapshotError(f"{key!r} is not a list")
    return value


def _int(item: object, key: str, default: int | None = None) -> int:
    value = item.get(key, default) if isinstance(item, dict) else None
    if not isinstance(value, int) or not 0 <= value < _UINT64:
        raise SnapshotError(f"an entry has no sensible {key!r}: {_shown(value)}")
    return value


def _str(item: object, key: str) -> str:
    value = item.get(key) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise SnapshotError(f"an entry has no {key!r}")
    return value
