"""What if? A recorded run's requests and frees, on another card or with other settings of the allocator.

    replay(trace, gpu="A40", allocator_conf="expandable_segments:True").fits

The requests are taken as they were: sizes that depend on the card (library workspaces, scratch of reductions) stay
those of the recording. A recording that ended out of memory says nothing of what would have come after: if the request
that failed is served, the run fits as far as it is known (`known_to_the_end` is False).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpt2.memory import gpus
from gpt2.memory.allocator import CachingAllocator
from gpt2.memory.caching.driver import Driver
from gpt2.memory.caching.out_of_memory import OutOfMemory
from gpt2.memory.caching.settings import Settings
from gpt2.memory.gpus import Gpu
from gpt2.memory.reading.history import BEFORE
from gpt2.memory.trace import Event, Mark, Trace

# What is tried to see which setting helps most; options that a version does not have are left out.
CONFIGURATIONS = ("", "expandable_segments:True", "max_split_size_mb:128", "max_split_size_mb:512",
                  "roundup_power2_divisions:8", "garbage_collection_threshold:0.8")
_UNLIMITED = 2**47  # bytes of a card that has room for everything
_OTHER_STREAM = -1  # stands for whichever stream a block waited for


@dataclass(frozen=True)
class Replay:
    """How a run went the second time. Bytes; `failed_at` is an index into the *recorded* events, None if all fitted."""

    fits: bool
    known_to_the_end: bool
    trace: Trace
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    failed_at: int | None
    message: str  # PyTorch's, where it failed
    notes: tuple[str, ...]

    def row(self) -> dict:
        """Without the trace, for a table."""
        return {"fits": self.fits, "known_to_the_end": self.known_to_the_end,
                "peak_allocated_bytes": self.peak_allocated_bytes, "peak_reserved_bytes": self.peak_reserved_bytes,
                "failed_at": self.failed_at, "message": self.message, "notes": list(self.notes)}


def replay(trace: Trace, *, gpu: str | Gpu | None = None, capacity_bytes: int | None = None,
           limit_bytes: int | None = None, allocator_conf: str = "", torch: str = "2.11.0") -> Replay:
    """Run the requests of `trace` through the allocator again.

    `gpu` names a card, or `capacity_bytes` says what the driver could give at the start; with neither, the recorded
    card and limit hold where the trace names them, else memory is unlimited. `limit_bytes` caps reserved memory.
    Raises ValueError for an unknown card or option, or a trace without allocations.
    """
    settings = Settings.parse(allocator_conf, torch)
    if not any(e.action == "alloc" for e in trace.events):
        raise ValueError("nothing to replay: the trace holds no allocation")
    total, capacity, limit = _card(trace, gpu, capacity_bytes, limit_bytes)
    run = _Run(Driver(total, capacity), settings, limit, torch)
    failed_at, message, waiting = None, "", sorted(trace.marks, key=lambda m: m.event_count)[::-1]
    for i, event in enumerate(trace.events):
        while waiting and waiting[-1].event_count <= i:
            run.mark(waiting.pop())
        try:
            run.feed(event, trace.events[i + 1] if i + 1 < len(trace) else None)
        except OutOfMemory as error:
            failed_at, message = i, str(error)
            break
    for mark in reversed(waiting if failed_at is None else []):
        run.mark(mark)
    meta = {**trace.meta, "kind": "predicted", "replayed_from": trace.meta.get("kind", ""), "limit_bytes": limit,
            "allocator_conf": allocator_conf, "torch": torch, "capacity_bytes": capacity, "total_bytes": total,
            "gpu": _name(gpu) or trace.meta.get("gpu", ""), "out_of_memory": {"message": message} if message else None}
    notes = [*settings.warnings]
    if any(e.phase == BEFORE for e in trace.events):
        notes.append("blocks older than the recording are placed in the order of their addresses, not of their birth")
    if run.ooms:
        notes.append("the recording itself ran out of memory: what would have come after is not known")
    allocator, fits = run.allocator, failed_at is None
    return Replay(fits, fits and not run.ooms, Trace(run.events, run.marks, trace.stacks, meta),
                  allocator.max_allocated_bytes, allocator.max_reserved_bytes, failed_at, message, tuple(notes))


def best_settings(trace: Trace, *, torch: str = "2.11.0", **card) -> list[dict]:
    """What each of `CONFIGURATIONS` would have done, the most helpful first: it fits, or gets furthest; then it
    reserves least. `card` as for `replay`. Bytes; saved_bytes is reserved memory against the default settings."""
    rows: list[dict] = []
    for conf in CONFIGURATIONS:
        try:
            result = replay(trace, allocator_conf=conf, torch=torch, **card)
        except ValueError:
            if not conf:
                raise  # not the option, but the card or the trace
            continue
        rows.append({"allocator_conf": conf, **result.row()})
    for row in rows:
        row["saved_bytes"] = rows[0]["peak_reserved_bytes"] - row["peak_reserved_bytes"]
    return sorted(rows, key=lambda row: (not row["fits"], -(row["failed_at"] or 0), row["peak_reserved_bytes"],
                                         len(row["allocator_conf"])))


def edited(trace: Trace, free_earlier: Mapping[int, int]) -> Trace:
    """The trace as if some blocks had been freed earlier: `{index in trace.blocks(): index of an event}`, the free
    following that event, as a `del` there would. Raises ValueError where the block is not alive then."""
    blocks, insert, drop = trace.blocks(), {}, set()
    for n, after in sorted(free_earlier.items()):
        if not 0 <= n < len(blocks):
            raise ValueError(f"there is no block {n}; the trace has {len(blocks)}")
        born, died, event = blocks[n]
        if after < born or after >= (len(trace) if died is None else died):
            raise ValueError(f"block {n} is not alive after event {after}: it lives from {born} to {died}")
        insert.setdefault(after, []).append(event)
        if died is not None:
            drop.add(died)
            drop.update(_completion(trace, died))
    events: list[Event] = []
    counts = [0]
    for i, event in enumerate(trace.events):
        if i not in drop:
            events.append(event)
        for freed in insert.get(i, ()):
            events.append(freed._replace(action="free", step=event.step, phase=event.phase))
        counts.append(len(events))
    marks = [m._replace(event_count=counts[min(m.event_count, len(trace))]) for m in trace.marks]
    return Trace(events, marks, trace.stacks, dict(trace.meta))


def saving(trace: Trace, free_earlier: Mapping[int, int], **card) -> dict[str, int]:
    """What freeing earlier changes at the peaks, in bytes; `card` as for `replay`."""
    before, after = replay(trace, **card), replay(edited(trace, free_earlier), **card)
    return {"peak_allocated_bytes": after.peak_allocated_bytes, "peak_reserved_bytes": after.peak_reserved_bytes,
            "saved_allocated_bytes": before.peak_allocated_bytes - after.peak_allocated_bytes,
            "saved_reserved_bytes": before.peak_reserved_bytes - after.peak_reserved_bytes}


class _Run:
    """The allocator, and what it writes down, with the labels of the event that is being fed."""

    def __init__(self, driver: Driver, settings: Settings, limit: int | None, torch: str):
        self.driver, self.events, self.marks, self.ooms = driver, [], [], 0
        self.allocator = CachingAllocator(driver, settings=settings, limit_bytes=limit, torch=torch,
                                          record=self._record)
        self._ours: dict[int, int] = {}
        self._event = Event("", 0, 0, 0)

    def _record(self, action: str, address: int, requested: int, block: int, stream: int) -> None:
        self.events.append(Event(action, address, requested, block, stream, *self._event[5:]))

    def feed(self, event: Event, following: Event | None) -> None:
        """One recorded event. Segments are the allocator's own business, but for memory given back without need."""
        self._event, address, allocator = event, event.address, self.allocator
        if event.phase == "forward" and event.step:
            self.driver.release_context_range()
        if event.action == "alloc":
            self._ours[address] = allocator.malloc(event.requested_bytes, event.stream)
        elif event.action == "free" and address in self._ours:
            allocator.free(self._ours.pop(address))
        elif event.action == "free_requested" and address in self._ours:
            allocator.record_stream(self._ours[address], _OTHER_STREAM)
            allocator.free(self._ours.pop(address))
        elif event.action == "free_completed":
            allocator.synchronize()
        elif event.action == "oom":
            allocator.free(allocator.malloc(event.requested_bytes, event.stream))
            self.ooms += 1
        elif event.action in ("segment_free", "segment_unmap") and _given_back(following):
            allocator.empty_cache()

    def mark(self, mark: Mark) -> None:
        a = self.allocator
        self.marks.append(mark._replace(
            event_count=len(self.events), allocated_bytes=a.allocated_bytes, reserved_bytes=a.reserved_bytes,
            max_allocated_bytes=a.max_allocated_bytes, max_reserved_bytes=a.max_reserved_bytes))


def _given_back(following: Event | None) -> bool:
    """Segments are freed in a retry, which a new segment or a failure follows, or by somebody's empty_cache()."""
    return following is None or following.action in ("alloc", "free", "free_requested", "free_completed")


def _completion(trace: Trace, died: int) -> list[int]:
    """The free_completed that belongs to a free_requested."""
    if trace.events[died].action != "free_requested":
        return []
    address = trace.events[died].address
    return [i for i in range(died + 1, len(trace))
            if trace.events[i].action == "free_completed" and trace.events[i].address == address][:1]


def _card(trace: Trace, gpu: str | Gpu | None, capacity_bytes: int | None,
          limit_bytes: int | None) -> tuple[int, int, int | None]:
    """(total, free at start, limit)."""
    for name, value in (("capacity", capacity_bytes), ("limit", limit_bytes)):
        if value is not None and value < 1:
            raise ValueError(f"the {name} must be at least 1 byte, not {value}")
    if gpu is not None:
        card = gpus.find(gpu) if isinstance(gpu, str) else gpu
        return card.memory_bytes, capacity_bytes or card.free_bytes_at_start, limit_bytes
    if capacity_bytes is not None:
        return capacity_bytes, capacity_bytes, limit_bytes
    known = trace.meta.get("capacity_bytes") or _UNLIMITED
    return max(known, trace.meta.get("total_bytes") or 0), known, limit_bytes or trace.meta.get("limit_bytes")


def _name(gpu: str | Gpu | None) -> str:
    return gpu.name if isinstance(gpu, Gpu) else gpu or ""
