"""A trace: what a caching allocator did, in order, and who asked for it.

Everything the study shows (peak, ledger, timeline, segment map, what-if) is a function of a `Trace`;
it does not matter whether a real GPU wrote it or the simulator. Bytes are integers everywhere.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple


class Category(str, Enum):
    """What a byte is for. The order is the order of every stack and legend in the study."""

    OUTSIDE = "outside the allocator"  # CUDA context, loaded kernels, other processes: never in memory_allocated()
    PARAMETERS = "parameters"  # the weights, each storage once
    OPTIMIZER = "optimizer state"  # moments, master copies, step counters on the GPU
    GRADIENTS = "gradients"  # what ends up in .grad
    ACTIVATIONS = "activations"  # made in forward, saved for backward
    LOSS = "loss"  # vocabulary-sized: logits, log-probabilities and their gradients
    INPUTS = "inputs and buffers"  # token ids, masks, other registered buffers
    TEMPORARIES = "temporaries"  # live and die inside one phase
    WORKSPACE = "library workspace"  # cuBLAS, cuBLASLt, cuDNN, sort and reduction scratch
    SLACK = "allocator slack"  # block minus request: rounding and blocks too small to split


class Frame(NamedTuple):
    """One line of a Python stack, innermost first."""

    file: str
    line: int
    name: str


ACTIONS = (
    "alloc",
    "free",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
)


class Event(NamedTuple):
    """One thing the allocator did.

    `free` is a free that took effect at once; a block that another stream still uses is `free_requested` first
    (it leaves `memory_allocated()` then) and `free_completed` later. For segment events both byte counts are the
    segment's; for `oom` they are what was asked and what it was rounded to (`address` is the free device memory).
    """

    action: str
    address: int
    requested_bytes: int
    block_bytes: int
    stream: int = 0
    step: int = 0  # training step, counted from 1; 0 is before the first
    phase: str = ""  # "warmup", "model", "batch", "forward", "backward", "clip", "optimizer", "zero_grad"
    module: str = ""  # "transformer.h.3.attn"; in backward the module whose forward made the node
    operator: str = ""  # "aten.addmm", or the library call that asks behind it: "cublas workspace"
    shape: tuple[int, ...] = ()
    dtype: str = ""  # "float32"
    category: str = ""  # a Category value, or "" while nobody has said
    stack: int = -1  # index into Trace.stacks, -1 for none


class Mark(NamedTuple):
    """A named moment: after `event_count` events the step reached `name`."""

    name: str
    event_count: int
    step: int
    allocated_bytes: int
    reserved_bytes: int
    max_allocated_bytes: int
    max_reserved_bytes: int


class Block(NamedTuple):
    """The life of one allocation: events [born, died) of the trace; `died` is None if it outlived the trace."""

    born: int
    died: int | None
    event: Event


@dataclass
class Trace:
    """Allocator events in order, with named moments and provenance.

    `meta` holds kind ("measured" | "predicted"), gpu, torch, and whatever says how the trace came about.
    """

    events: list[Event] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    stacks: list[tuple[Frame, ...]] = field(default_factory=list)
    meta: dict = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.events)

    def blocks(self) -> list[Block]:
        """Every allocation with its birth and death, in order of birth."""
        lives: list[Block] = []
        live: dict[int, int] = {}
        for i, event in enumerate(self.events):
            if event.action == "alloc":
                live[event.address] = len(lives)
                lives.append(Block(i, None, event))
            elif event.action in ("free", "free_requested"):
                j = live.pop(event.address, None)
                if j is not None:  # a free of something older than the trace has no block here
                    lives[j] = lives[j]._replace(died=i)
        return lives

    def allocated_bytes(self) -> list[int]:
        """`memory_allocated()` after each event."""
        return list(_running(self.events, ("alloc",), ("free", "free_requested")))

    def reserved_bytes(self) -> list[int]:
        """`memory_reserved()` after each event."""
        return list(_running(self.events, ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")))

    def peak(self, steps: Iterable[int] | None = None) -> int:
        """Index of the event at which allocated bytes are first highest, among `steps` (default: all)."""
        wanted = None if steps is None else set(steps)
        curve = self.allocated_bytes()
        inside = [i for i, e in enumerate(self.events) if wanted is None or e.step in wanted]
        if not inside:
            raise ValueError("no events in these steps")
        return max(inside, key=lambda i: (curve[i], -i))

    def live_at(self, index: int) -> list[Block]:
        """The blocks alive after event `index`."""
        return [b for b in self.blocks() if b.born <= index and (b.died is None or b.died > index)]

    def save(self, path: str | Path) -> None:
        """Write columnar, gzipped JSON: bytes are the same for the same trace. Atomic."""
        columns = {name: _pack([event[i] for event in self.events]) for i, name in enumerate(Event._fields)}
        document = {"format": 1, "meta": self.meta, "marks": self.marks, "stacks": self.stacks, "events": columns}
        text = json.dumps(document, separators=(",", ":"))
        temporary = Path(f"{path}.{os.getpid()}.tmp")
        temporary.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote. Raises ValueError naming the file if it is not a trace."""
        try:
            document = json.loads(gzip.decompress(Path(path).read_bytes()))
            columns = [_unpack(document["events"][name]) for name in Event._fields]
            events = [Event(*row)._replace(shape=tuple(row[9])) for row in zip(*columns, strict=True)]
            stacks = [tuple(Frame(*f) for f in stack) for stack in document["stacks"]]
            return cls(events, [Mark(*m) for m in document["marks"]], stacks, document["meta"])
        except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a trace of this study: {error}") from error


def _running(events: list[Event], plus: tuple[str, ...], minus: tuple[str, ...]) -> Iterator[int]:
    total = 0
    for event in events:
        if event.action in plus:
            total += event.block_bytes
        elif event.action in minus:
            total -= event.block_bytes
        yield total


def _pack(values: tuple) -> dict | list:
    """A column with few distinct values is a vocabulary and indices."""
    keys = list(dict.fromkeys(values))
    if len(keys) > len(values) // 4:
        return list(values)
    index = {key: i for i, key in enumerate(keys)}
    return {"values": keys, "index": [index[v] for v in values]}


def _unpack(column: dict | list) -> list:
    return [column["values"][i] for i in column["index"]] if isinstance(column, dict) else column
