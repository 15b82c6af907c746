"""Blocks and pools: the two data structures of PyTorch's caching allocator.

A *segment* is what the driver gave; it is cut into *blocks*, a doubly linked list in address order. A *pool* holds the
free blocks of one kind, sorted by (stream, size, address), and counts. All byte counts are integers.
Source of every rule: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.6 and 2.11.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from gpt2.memory.caching.counts import Counts

MIN_BLOCK_BYTES = 512  # every block is a multiple of this, unless roundup_power2_divisions says otherwise
SMALL_BYTES = 1_048_576  # a rounded size up to and including this lives in the small pool
SMALL_SEGMENT_BYTES = 2_097_152  # what the small pool takes from the driver at a time
LARGE_SEGMENT_BYTES = 20_971_520  # the same for the large pool, while the rounded size is below the next constant
OWN_SEGMENT_BYTES = 10_485_760  # from here on a request gets a segment of its own size
ROUND_LARGE_BYTES = 2_097_152  # ... rounded up to a multiple of this

FREE, ALLOCATED, PENDING, UNMAPPED = range(4)  # a pending block was freed, but another stream may still use it
STATE_NAMES = ("inactive", "active_allocated", "active_pending_free", "unmapped")  # as in the snapshot


class Segment(NamedTuple):
    """One segment as `torch.cuda.memory_snapshot()` reports it; blocks are (address, size, requested, state)."""

    address: int
    total_bytes: int
    stream: int
    kind: str  # "small" | "large"
    is_expandable: bool
    blocks: tuple[tuple[int, int, int, str], ...]


class Arena:
    """The address range that one expandable segment may grow into, one physical page at a time."""

    __slots__ = ("address", "size", "page_bytes")

    def __init__(self, address: int, size: int, page_bytes: int):
        self.address, self.size, self.page_bytes = address, size, page_bytes


class Block:
    """A contiguous range of one segment, in one state. `requested` is what its last user asked for."""

    __slots__ = ("address", "size", "requested", "state", "stream", "pool", "prev", "next", "arena", "used_by", "born")

    def __init__(self, address, size, requested, state, stream, pool, prev, next_, arena):
        self.address: int = address
        self.size: int = size
        self.requested: int = requested
        self.state: int = state
        self.stream: int = stream
        self.pool: Pool = pool
        self.prev: Block | None = prev
        self.next: Block | None = next_
        self.arena: Arena | None = arena  # None: the segment came from cudaMalloc
        self.used_by: set[int] | None = None  # other streams, from record_stream
        self.born: int = 0  # the pool's count of searches when it became free: the age for garbage collection

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    def splice(self, before: Block | None, after: Block | None) -> None:
        """Take the place between two neighbours."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


class Pool(Counts):
    """The free (and, when expandable, the unmapped) blocks of one kind, and the counts of what is in use."""

    __slots__ = ("kind", "is_small", "min_remainder", "page_bytes", "free", "unmapped", "searches")

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.is_small = kind, kind == "small"
        self.min_remainder = self.page_bytes = 0  # set by the allocator: they depend on its settings
        self.free: dict[int, list[tuple[int, int, Block]]] = {}  # stream -> sorted (size, address, block)
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}  # stream -> sorted (address, block)
        self.searches = 0

    def add(self, block: Block) -> None:
        """Put a free or unmapped block where the search finds it."""
        if block.state == UNMAPPED:
            insort(self.unmapped.setdefault(block.stream, []), (block.address, block))
        else:
            block.born = self.searches
            insort(self.free.setdefault(block.stream, []), (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Undo `add`, before size, address or state change."""
        if block.state == UNMAPPED:
            found = self.unmapped[block.stream]
            del found[bisect_left(found, (block.address,))]
        else:
            found = self.free[block.stream]
            del found[bisect_left(found, (block.size, block.address))]

    def absorb(self, block: Block, neighbour: Block | None) -> int:
        """Merge a neighbour of the same state into a block that is in no list; return its size, 0 if it must stay."""
        if neighbour is None or neighbour.state != block.state:
            return 0
        self.remove(neighbour)
        if neighbour is block.prev:
            block.address = neighbour.address
            block.splice(neighbour.prev, block.next)
        else:
            block.splice(block.prev, neighbour.next)
        block.size += neighbour.size
        return neighbour.size

    def free_blocks(self) -> list[Block]:
        """All free blocks in the order of the set: stream, size, address."""
        return [block for stream in sorted(self.free) for _, _, block in self.free[stream]]
