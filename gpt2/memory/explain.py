"""Read my out-of-memory message: what was asked for, how far the step was, why it failed, what to do next.

    print(explain("CUDA out of memory. Tried to allocate 394.00 MiB (GPU 0; ...").text())

All sizes are bytes; printed ones are MiB or GiB, as PyTorch prints them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from gpt2.memory.caching.out_of_memory import format_size
from gpt2.memory.explaining import advice, oom_message
from gpt2.memory.explaining.candidates import LIKELY_BATCH, Candidate, candidates, request_range
from gpt2.memory.explaining.oom_message import OomMessage
from gpt2.memory.explaining.progress import Progress, progress
from gpt2.model import Size
from gpt2.model import size as size_of

_CONTEXT_BYTES = 512 * 2**20  # what CUDA's context takes where nobody says (526.8 MiB were measured on an H200)
_NOTABLE_BYTES = 2**30  # other processes below it may be no more than a context that is bigger than we think
_LARGE_SHARE = 0.02  # of the card: below it, unallocated memory is not what the failure is about


@dataclass(frozen=True)
class Explanation:
    """What a message means. `blocks_done` is None where the allocated bytes do not say."""

    message: OomMessage
    asked: str  # which requests the printed size stands for
    candidates: tuple[Candidate, ...]
    progress: tuple[Progress, ...]
    blocks_done: int | None
    cause: str  # "size" | "fragmentation" | "limit" | "another process" | "outside this allocator"
    why: str
    advice: tuple[str, ...]  # most useful first

    def to_json(self) -> str:
        """The same as text for programs; sizes in bytes."""
        document = dataclasses.asdict(self)
        document["candidates"] = [c._asdict() for c in self.candidates]
        document["progress"] = [p._asdict() for p in self.progress]
        return json.dumps(document, indent=2, ensure_ascii=False)

    def text(self, at_most: int = 8) -> str:
        """For people; `at_most` candidates are shown."""
        lines = [f"Asked for   {self.message.requested or 'a size the message does not give'}: {self.asked}."]
        lines += [f"May be      {c.label}" for c in self.candidates[:at_most]]
        if len(self.candidates) > at_most:
            lines.append(f"            and {len(self.candidates) - at_most} less likely ones")
        lines += [f"How far     {line}" for line in self._how_far()]
        lines.append(f"Cause       {self.cause}: {self.why}")
        lines += [f"Do {i:<8} {what}" for i, what in enumerate(self.advice, 1)]
        return "\n".join(lines)

    def _how_far(self) -> list[str]:
        if self.progress:
            return [f"{p.blocks_done} blocks done if this is the {p.step} step of: {p.implementation}"
                    for p in self.progress]
        return [] if self.blocks_done is None else [f"all {self.blocks_done} blocks done; the step is at the loss"]


def explain(message: str, *, model: str | Size = "124M", batch: int | None = None, length: int | None = None,
            vocabulary: int | None = None, allocator_conf: str = "") -> Explanation:
    """Explain the first out-of-memory message in `message`.

    Tell what you know: `model` (a name in gpt2.model.SIZES, or a Size), `batch` in sequences, `length` in tokens,
    `vocabulary` in words (else the model's and the next multiple of 64: 50,257 and 50,304), and the
    `allocator_conf` the run had. Raises ValueError, in one line, if there is no such message or a figure is below 1.
    """
    for name, value in (("batch", batch), ("length", length), ("vocabulary", vocabulary)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    size = model if isinstance(model, Size) else size_of(model)
    read = oom_message.read(message)
    found = () if not read.requested_bytes else tuple(candidates(
        read.requested, size, batch=batch, length=length, vocabularies=() if vocabulary is None else (vocabulary,)))
    readings = tuple(progress(size, read.allocated_bytes, list(found)))
    cause, why = find_cause(read)
    likely = [c for c in found if c.batch <= LIKELY_BATCH]
    at_loss = likely and all(c.kind == "loss" and c.length == (length or size.context) for c in likely)
    return Explanation(
        read, _asked(read), found, readings,
        readings[0].blocks_done if readings else size.layers if at_loss else None,
        cause, why, tuple(advice.advise(read, cause, found, batch=batch, allocator_conf=allocator_conf)))


def _asked(read: OomMessage) -> str:
    if read.requested_bytes is None:
        return f"it comes from {read.source}, outside the caching allocator, which prints no sizes"
    if read.requested_bytes >= 2**60:
        return "no tensor is that big: a size overflowed or a shape is wrong"
    if read.source == "cudaMallocAsync":
        return "the tensor itself, to two decimals: this backend does not round to segments"
    return request_range(read.requested_bytes)


def find_cause(read: OomMessage) -> tuple[str, str]:
    """(cause, why) from the figures of a message alone."""
    asked, free, total = read.requested_bytes, read.free_bytes, read.total_bytes
    if asked is None:
        return "outside this allocator", ("memory was short where a library or the driver asked for its own; "
                                          "PyTorch's cache may hold what they need")
    if total is not None and asked > total or asked >= 2**60:
        return "size", f"{read.requested} is more than the whole card has"
    if free is not None and free >= asked:
        return _refused_with_room(read)
    return _no_room(read)


def _refused_with_room(read: OomMessage) -> tuple[str, str]:
    """The driver had more than was asked: size is not the matter."""
    free = format_size(read.free_bytes)
    if read.allowed_bytes is not None:
        return "limit", (f"{free} of the card are free, but this process may use only "
                         f"{format_size(read.allowed_bytes)} and has reserved {_size(read.reserved_bytes)}")
    return "outside this allocator", (f"{free} were free when {read.requested} were refused, so it is not a matter of "
                                      "size; look outside this allocator: another process that came and went, a limit "
                                      "on this process or container, or the driver's own fragmentation")


def _no_room(read: OomMessage) -> tuple[str, str]:
    short = read.requested_bytes - read.room_bytes
    idle, others = read.unallocated_bytes or 0, other_bytes(read)
    if others >= max(short, _NOTABLE_BYTES) and others > idle:
        return "another process", (f"about {format_size(others)} of the card are in use outside this process, "
                                   f"and {format_size(short)} more would have been enough")
    if idle >= short and idle >= _LARGE_SHARE * (read.total_bytes or idle):
        return "fragmentation", (f"{format_size(idle)} are reserved by PyTorch and in no tensor, but not in one piece; "
                                 f"{format_size(short)} more in one piece would have been enough")
    return "size", (f"{_size(read.allocated_bytes)} are in live tensors and {_size(read.free_bytes)} free: "
                    f"{read.requested} more do not fit")


def other_bytes(read: OomMessage) -> int:
    """Bytes in use on the card by other processes, as far as the message lets us say; 0 where it does not.

    In a container the driver names our own process by a number we do not know: one process that holds about what
    PyTorch reserved, where "this process" is not named, is ours.
    """
    named = [size for _, size in read.processes if size is not None]
    if read.this_process_bytes is None and read.reserved_bytes is not None and named:
        ours = min(named, key=lambda size: abs(size - read.reserved_bytes))
        if 0 <= ours - read.reserved_bytes + 2**26 <= 2**31:
            named.remove(ours)
            return sum(named)
    if named:
        return sum(named)
    ours = read.this_process_bytes or (read.reserved_bytes and read.reserved_bytes + _CONTEXT_BYTES)
    if None in (read.total_bytes, read.free_bytes, ours):
        return 0
    return max(0, read.total_bytes - read.free_bytes - ours)


def _size(size: int | None) -> str:
    return "an unknown amount" if size is None else format_size(size)
