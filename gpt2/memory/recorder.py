"""A real GPU, listened to: PyTorch's own memory history, with the labels the simulator gives.

    with Recorder() as card:
        ...the same code as under SimulatedGpu...
    trace = card.trace()

Who asked comes from torch.profiler (the host's side: no device memory), phases from `watch`, owners from claims. One
case is recorded wrongly with it: under torch.vmap the profiler's weak references keep the wrapped tensors' memory.
"""

from __future__ import annotations

import bisect
import math
from contextlib import ExitStack, contextmanager

import torch
from torch.autograd.profiler import record_function

from gpt2.memory.allocator import CachingAllocator
from gpt2.memory.caching.driver import Driver, ReplayDriver
from gpt2.memory.caching.settings import Settings
from gpt2.memory.claims import Claims, settle
from gpt2.memory.labels import Labels
from gpt2.memory.trace import Event, Frame, Mark, Trace

MAX_ENTRIES = 2_000_000
MODULE = "module:"  # prefix of the profiler ranges that name a module


class Recorder:
    """The current CUDA device from now on; nothing may have been allocated on it before.

    Args:
        limit_bytes: what the process may reserve (set_per_process_memory_fraction).
        operators: label events with operator, module and shape through torch.profiler.
        stacks: keep Python stacks.
    """

    def __init__(
        self, *, limit_bytes: int | None = None, operators: bool = True, stacks: bool = False, allocator_conf: str = ""
    ):
        self.limit_bytes, self.operators, self.stacks, self.allocator_conf = (
            limit_bytes,
            operators,
            stacks,
            allocator_conf,
        )
        self.marks: list[Mark] = []
        self._phases: list[tuple[int, str, int]] = [(0, "", 0)]
        self.out_of_memory: dict | None = None
        self.labels = Labels(Claims(lambda t: t.untyped_storage().data_ptr() if t.is_cuda else 0, self._position))

    def __enter__(self) -> Recorder:
        if not torch.cuda.is_available():
            raise RuntimeError("there is no GPU to record on; SimulatedGpu predicts one")
        self.free_at_start, self.total = torch.cuda.mem_get_info()
        if self.limit_bytes:
            torch.cuda.set_per_process_memory_fraction(self.limit_bytes / self.total)
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")
        self._stack = ExitStack()
        if self.operators:
            self.labels.install()
            self.labels.around = record_function
            self._stack.callback(self.labels.remove)
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, profile_memory=True
            )
            self._profiler.__enter__()
            self._stack.push(self._profiler.__exit__)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            phase = self._phases[-1]
            self.out_of_memory = {"step": phase[2], "phase": phase[1], "message": str(error)}
        self._stack.close()
        self._history = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)

    @staticmethod
    def _position() -> int:
        counts = torch._C._cuda_memoryStats(torch.cuda.current_device())["allocation"]["all"]
        return counts["allocated"] + counts["freed"]

    @contextmanager
    def watch(self, phase: str, step: int):
        """Announce a phase of a step: its events carry the names, and its end is a mark of the trace."""
        self._phases.append((self._position(), phase, step))
        self.labels.announced, self.labels.step, self.labels.watched = phase, step, True
        yield
        self.labels.announced = ""
        self._phases.append((self._position(), "", step))
        self.mark(phase, step)

    def mark(self, name: str, step: int | None = None) -> None:
        """Note the counters now, under a name."""
        self.marks.append(
            Mark(
                name,
                self._position(),
                self.labels.step if step is None else step,
                torch.cuda.memory_allocated(),
                torch.cuda.memory_reserved(),
                torch.cuda.max_memory_allocated(),
                torch.cuda.max_memory_reserved(),
            )
        )

    def trace(self, **meta) -> Trace:
        """What happened, once the recorder has been left. `meta` is added to what is known of the machine."""
        history = next((t for t in self._history["device_traces"] if t), [])
        stacks = _Stacks(self.stacks)
        events = _with_blocks(_events(history, stacks), self.allocator_conf, self.limit_bytes, meta)
        if self.operators:
            events = _with_operators(events, self._profiler, meta)
        where = _event_counts(events)
        events = self._with_phases(events, where)
        if self.out_of_memory:
            self._locate_failure(events)
        marks = [m._replace(event_count=where(m.event_count)) for m in self.marks]
        about = {
            "kind": "measured",
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "limit_bytes": self.limit_bytes,
            "allocator_conf": self.allocator_conf,
            "capacity_bytes": self.free_at_start,
            "total_bytes": self.total,
            "out_of_memory": self.out_of_memory,
            "max_allocated_bytes": max((m.max_allocated_bytes for m in self.marks), default=0),
        }
        return Trace(settle(events, self.labels.claims.made), marks, stacks.list, {**about, **meta})

    def _with_phases(self, events, where):
        starts = [where(position) for position, _, _ in self._phases]
        labelled = []
        for i, event in enumerate(events):
            _, phase, step = self._phases[bisect.bisect_right(starts, i) - 1]
            labelled.append(event._replace(phase=event.phase or phase, step=step))
        return labelled

    def _locate_failure(self, events) -> None:
        failed = next((e for e in reversed(events) if e.action == "oom"), None)
        if failed is not None:
            self.out_of_memory |= {
                "requested_bytes": failed.requested_bytes,
                "operator": failed.operator,
                "module": failed.module,
                "phase": failed.phase or self.out_of_memory["phase"],
            }


class _Stacks:
    """Interned Python stacks."""

    def __init__(self, wanted: bool):
        self.wanted, self.list, self._index = wanted, [], {}

    def add(self, frames) -> int:
        if not self.wanted or not frames:
            return -1
        stack = tuple(Frame(f["filename"], f["line"], f["name"]) for f in frames)
        if stack not in self._index:
            self._index[stack] = len(self.list)
            self.list.append(stack)
        return self._index[stack]


def _events(history, stacks: _Stacks) -> list[Event]:
    """PyTorch's entries as events; a free requested and completed at once is one `free`."""
    events, i = [], 0
    while i < len(history):
        entry = history[i]
        action, size = entry["action"], entry["size"]
        address = entry.get("addr", entry.get("device_free", 0))
        if (
            action == "free_requested"
            and i + 1 < len(history)
            and history[i + 1]["action"] == "free_completed"
            and history[i + 1]["addr"] == address
        ):
            action, i = "free", i + 1
        if action != "snapshot":
            events.append(Event(action, address, size, size, entry["stream"], stack=stacks.add(entry.get("frames"))))
        i += 1
    return events


def _with_blocks(events: list[Event], conf: str, limit_bytes: int | None, meta: dict) -> list[Event]:
    """The history knows what was requested; how big the block was follows by replaying it through our allocator.

    meta["address_mismatches"] counts the blocks that the replay puts elsewhere (native segments only).
    """
    native = "expandable_segments:True" not in conf
    driver = ReplayDriver(e.address for e in events if e.action == "segment_alloc") if native else Driver(2**47)
    release = torch.__version__.partition("+")[0]
    allocator = CachingAllocator(driver, settings=Settings.parse(conf, release), limit_bytes=limit_bytes, torch=release)
    ours: dict[int, int] = {}
    sized, mismatches = [], 0
    for event in events:
        if event.action == "alloc":
            address = ours[event.address] = allocator.malloc(event.requested_bytes, event.stream)
            mismatches += native and address != event.address
            event = event._replace(block_bytes=allocator.block_bytes(address))
        elif event.action in ("free", "free_requested") and event.address in ours:
            address = ours.pop(event.address)
            event = event._replace(block_bytes=allocator.block_bytes(address))
            allocator.free(address)
        sized.append(event)
    meta["address_mismatches"] = mismatches if native else None
    return sized


def _event_counts(events: list[Event]):
    """Maps a number of allocations and frees to the number of events up to there."""
    after = [0]
    for i, event in enumerate(events):
        if event.action in ("alloc", "free", "free_requested"):
            after.append(i + 1)
    return lambda position: after[min(position, len(after) - 1)]


def _with_operators(events: list[Event], profiler, meta: dict) -> list[Event]:
    """Operator, module and shape from the profiler: its memory readings are the same allocations in the same order."""
    readings = list(_readings(profiler.profiler.kineto_results.events()))
    labelled, matched, waiting = list(events), 0, iter(readings)
    for i, event in enumerate(events):
        if event.action not in ("alloc", "free", "free_requested"):
            continue
        reading = next(waiting, None)
        if reading is None or (reading["bytes"] > 0) != (event.action == "alloc"):
            break
        matched += 1
        if event.action == "alloc":
            shape = _output_shape(reading["shapes"], event.requested_bytes)
            labelled[i] = event._replace(
                operator=reading["operator"], module=reading["module"], phase=reading["phase"], shape=shape
            )
    meta["operators_matched"] = matched
    return labelled


def _readings(kineto_events):
    """For each allocation or free on the GPU, in time order: bytes and the innermost operator around it."""
    cuda = torch._C._autograd.DeviceType.CUDA
    spans, readings = [], []
    for event in kineto_events:
        if event.name() == "[memory]":
            if event.device_type() == cuda:
                readings.append(event)
        elif event.device_type() != cuda:
            spans.append(event)
    spans.sort(key=lambda e: (e.start_ns(), -e.duration_ns()))
    readings.sort(key=lambda e: e.start_ns())
    modules, open_spans, next_span = {}, [], 0
    for reading in readings:
        now = reading.start_ns()
        while next_span < len(spans) and spans[next_span].start_ns() <= now:
            span = spans[next_span]
            next_span += 1
            open_spans = [s for s in open_spans if s.start_ns() + s.duration_ns() > span.start_ns()]
            open_spans.append(span)
            if span.sequence_nr() >= 0 and span.scope() != 1:  # scope 1: backward function
                module = next((s.name() for s in reversed(open_spans) if s.name().startswith(MODULE)), "")
                modules.setdefault(span.sequence_nr(), module.removeprefix(MODULE))
        open_spans = [s for s in open_spans if s.start_ns() + s.duration_ns() >= now]
        yield {"bytes": reading.nbytes(), **_who(open_spans, modules)}


def _who(spans, modules) -> dict:
    """Operator, module, phase and input shapes of the innermost of these profiler ranges."""
    operator = next((s for s in reversed(spans) if s.name().startswith("aten::")), None)
    node = next((s for s in reversed(spans) if s.scope() == 1), None)
    module = next((s.name().removeprefix(MODULE) for s in reversed(spans) if s.name().startswith(MODULE)), "")
    phase = "recompute" if node is not None and module else ""
    if not module and node is not None:
        module = modules.get(node.sequence_nr(), "")
    return {
        "operator": operator.name().replace("::", ".") if operator else "",
        "module": module,
        "phase": phase,
        "shapes": operator.shapes() if operator else [],
    }


def _output_shape(shapes, size: int) -> tuple[int, ...]:
    """The shape among an operator's inputs, or their matrix product's, that accounts for `size` bytes; () if none."""
    plain = [tuple(s) for s in shapes if s and all(isinstance(n, int) for n in s)]
    products = [(*a[:-1], b[-1]) for a, b in zip(plain, plain[1:], strict=False) if len(b) > 1 and a[-1] == b[-2]]
    for shape in products + plain:
        if size in (math.prod(shape) * width for width in (4, 2, 8, 1)):
            return shape
    return ()
