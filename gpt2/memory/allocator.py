"""PyTorch's CUDA caching allocator, block for block: native and expandable segments. Pure Python, no GPU.

The driver is slow, so memory is taken from it in segments, cut into blocks, and kept. `malloc` takes the best
fitting free block, else a new segment, else it releases what is idle and tries again; `free` merges neighbours.
Source of every rule: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.6, and what changed until 2.14; replayed
recordings of a real GPU land every block on its recorded address (tests/test_allocator.py).

Not modelled: CUDA graphs, private memory pools, peer access, callbacks that free memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from gpt2.memory.caching.accounts import not_live
from gpt2.memory.caching.blocks import (
    ALLOCATED,
    FREE,
    MIN_BLOCK_BYTES,
    PENDING,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    UNMAPPED,
    Block,
    Pool,
    Segment,
)
from gpt2.memory.caching.counts import Counts, Stat
from gpt2.memory.caching.driver import Driver, ReplayDriver
from gpt2.memory.caching.out_of_memory import OutOfMemory, format_size
from gpt2.memory.caching.reserve import Recorder, Reserve, segment_size
from gpt2.memory.caching.settings import Settings

__all__ = [
    "CachingAllocator",
    "Driver",
    "OutOfMemory",
    "ReplayDriver",
    "Segment",
    "Settings",
    "format_size",
    "round_size",
    "segment_size",
]

_MIB = 2**20
_DEFAULT = Settings()
_NEVER = 2**63


def round_size(size: int, divisions: tuple[int, ...] = (0,) * 16) -> int:
    """The size of the block that serves a request of `size` bytes, before splitting decides; see `Settings`."""
    if size < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    count = divisions[min(max(size.bit_length() - 21, 0), 15)]
    if count <= 1 or size <= MIN_BLOCK_BYTES * count:
        return (size + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES
    floor = 1 << (size.bit_length() - 1)  # the power of 2 below, and its interval cut into `count` steps
    step = floor // count
    return -(-size // step) * step


class CachingAllocator(Reserve):
    """The allocator of one device.

    `limit_bytes` is a cap on reserved memory, as a memory fraction sets it; `torch` the version whose rules hold;
    `record` is called for every event in PyTorch's order with (action, address, requested, block bytes, stream),
    actions as in `trace.ACTIONS`.

    Other streams: a block that `record_stream` gave to another stream stays active after `free` until that stream
    has passed the free. Here the device is taken to be behind until `synchronize()`, and the block returns to its
    pool at the next `malloc` after it, or when memory runs out and PyTorch itself waits: the most memory it can take.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        settings: Settings = _DEFAULT,
        limit_bytes: int | None = None,
        torch: str = "2.11.0",
        record: Recorder | None = None,
    ):
        self.driver, self.torch, self.record = driver, torch, record
        self._small, self._large = Pool("small"), Pool("large")
        self._all = Counts()
        self._rising = False  # counts went up since the peaks were last taken
        self._live: dict[int, Block] = {}
        self._waiting: list[Block] = []  # freed, but another stream may still use them; in order
        self._finished: list[Block] = []  # ... and all other streams have passed the free
        self._limit = limit_bytes
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self._events = dict.fromkeys(
            ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"), 0
        )
        self.configure(settings)
        if limit_bytes is None and settings.per_process_memory_fraction < 1.0:
            self.set_fraction(settings.per_process_memory_fraction)

    def configure(self, settings: Settings) -> None:
        """Change the settings of a running allocator; blocks that exist stay as they are."""
        self.settings = settings
        self._expandable = settings.expandable_segments
        self._max_split = settings.max_split_bytes
        self._split_below = _NEVER if self._expandable else self._max_split
        self._large_segment = settings.large_segment_size_mb * _MIB
        self._divides = any(d > 1 for d in settings.roundup_power2_divisions)
        self._small.min_remainder, self._small.page_bytes = MIN_BLOCK_BYTES, SMALL_SEGMENT_BYTES
        self._large.min_remainder = MIN_BLOCK_BYTES if self._expandable else SMALL_BYTES + 1
        self._large.page_bytes = self._large_segment
        self._choose_search()

    @property
    def limit_bytes(self) -> int | None:
        """The cap on reserved memory; None: the card is the limit."""
        return self._limit

    @limit_bytes.setter
    def limit_bytes(self, limit: int | None) -> None:
        self._limit = limit
        self._choose_search()

    def _choose_search(self) -> None:
        """Whether the smallest block that is big enough is the one to take: so unless an option says otherwise."""
        self._collects = self.limit_bytes is not None and self.settings.garbage_collection_threshold > 0
        arenas = self._expandable or self._small.unmapped or self._large.unmapped
        self._first_fits = not (arenas or self._collects or self.settings.max_split_size_mb is not None)

    # ---- the four calls ----

    def malloc(self, requested_bytes: int, stream: int = 0) -> int:
        """Address of a new block for `requested_bytes` on a stream; 0 for 0 bytes, which leaves no trace.

        Raises OutOfMemory when neither the cache nor the driver can serve it, ValueError below 0 bytes.
        """
        if requested_bytes <= 0:
            return _nothing(requested_bytes)
        if self._finished:
            self._complete()
        if self._divides:
            size = round_size(requested_bytes, self.settings.roundup_power2_divisions)
        else:
            size = (requested_bytes + 511) & -512  # MIN_BLOCK_BYTES, spelt out: this line runs for every request
        pool = self._small if size <= SMALL_BYTES else self._large
        if self._collects:
            pool.searches += 1
        free, block = pool.free.get(stream), None
        if free:
            i = bisect_left(free, (size,))
            if i < len(free) and (self._first_fits or (i := self._choose(free, i, size)) is not None):
                block = free.pop(i)[2]
        if block is None:
            block = self._obtain(pool, size, stream, requested_bytes)
        if block.size - size >= pool.min_remainder and size < self._split_below:
            block = self._split(pool, block, size)
        elif block.arena is None and (block.prev is not None or block.next is not None):
            pool.splits -= 1
            pool.freed_splits += 1
            pool.split_bytes -= block.size
            pool.freed_split_bytes += block.size
        block.state, block.requested = ALLOCATED, requested_bytes
        self._count(pool, block)
        return block.address

    def free(self, address: int) -> None:
        """Give a block back; it merges with free neighbours. Raises ValueError if no live block starts there."""
        block = self._live.pop(address, None)
        if block is None:
            return not_live(address)
        if self._rising:
            self._take_peaks()
        pool = block.pool
        pool.count -= 1
        pool.freed_count += 1
        pool.live_bytes -= block.size
        pool.freed_live_bytes += block.size
        if block.size >= self._max_split:
            self.oversize_allocations.decrease(1)
        if block.used_by:
            self._wait(block)
            return
        if self.record is not None:
            self.record("free", address, block.requested, block.size, block.stream)
        self._return(block)

    def record_stream(self, address: int, stream: int) -> None:
        """Another stream uses the block too, so `free` waits for it. Raises ValueError if it is not live."""
        block = self._live.get(address)
        if block is None:
            return not_live(address)
        if stream != block.stream:
            block.used_by = (block.used_by or set()) | {stream}

    def synchronize(self, stream: int | None = None) -> None:
        """The device has caught up, or this stream of it: blocks that waited for it return at the next `malloc`."""
        if not self._waiting:
            return
        done = [block for block in self._waiting if stream is None or block.used_by == {stream}]
        self._finished += done
        self._waiting = [block for block in self._waiting if block not in done]

    # ---- free blocks ----

    def _choose(self, free: list, i: int, size: int) -> int | None:
        """Index of the block to take, starting from the smallest that is big enough; None to take none."""
        if free[i][2].arena is not None:
            if self._expandable:
                while i + 1 < len(free) and free[i][2].arena and _reach(free[i + 1][2]) < _reach(free[i][2]):
                    i += 1
            else:
                while i < len(free) and free[i][2].arena is not None:
                    i += 1
                if i == len(free):
                    return None
        slack = self.settings.max_non_split_rounding_mb * _MIB
        if size < self._max_split <= free[i][0] or size >= self._max_split and free[i][0] >= size + slack:
            return None
        return i

    def _split(self, pool: Pool, rest: Block, size: int) -> Block:
        """Cut the request off the low end of a free block; the rest is free again."""
        prev = rest.prev
        block = Block(rest.address, size, 0, FREE, rest.stream, pool, prev, rest, rest.arena)
        if rest.arena is not None:
            pass  # pieces of expandable segments do not count as split: whole pages can always be given back
        elif prev is not None or rest.next is not None:
            pool.split_bytes -= size
            pool.freed_split_bytes += size
        else:
            pool.splits += 1
            pool.split_bytes += rest.size - size
            self._take_split_peaks(pool)
        if prev is not None:
            prev.next = block
        rest.prev = block
        rest.address += size
        rest.size -= size
        rest.born = pool.searches
        insort(pool.free.setdefault(rest.stream, []), (rest.size, rest.address, rest))
        return block

    def _count(self, pool: Pool, block: Block) -> None:
        """A block went to the user."""
        self._live[block.address] = block
        pool.count += 1
        pool.live_bytes += block.size
        pool.requested += block.requested
        self._rising = True
        if block.size >= self._max_split:
            self.oversize_allocations.increase(1)
        if self.record is not None:
            self.record("alloc", block.address, block.requested, block.size, block.stream)

    def _return(self, block: Block) -> None:
        """A block that nobody uses goes back to its pool, merged with free neighbours."""
        pool, size = block.pool, block.size
        pool.requested -= block.requested
        pool.freed_requested += block.requested
        block.state = FREE
        merged = 0
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.state == FREE:
                pool.absorb(block, neighbour)
                merged += 1
        block.born = pool.searches
        insort(pool.free.setdefault(block.stream, []), (block.size, block.address, block))
        if block.arena is None:
            self._count_split(pool, merged, block, size)

    def _count_split(self, pool: Pool, merged: int, block: Block, size: int) -> None:
        """Unused pieces of segments after a free: `merged` went into the block, which itself is one unless whole."""
        if block.prev is None and block.next is None:
            pool.splits -= merged
            pool.freed_splits += merged
            pool.split_bytes -= block.size - size
            pool.freed_split_bytes += block.size - size
        else:
            pool.splits += 1 - merged
            if merged == 2:
                pool.freed_splits += 1
            pool.split_bytes += size
            self._take_split_peaks(pool)

    def _wait(self, block: Block) -> None:
        """Freed, but other streams were told of the block: it stays active."""
        block.pool.pending_count += 1
        block.pool.pending_bytes += block.size
        block.state = PENDING
        self._waiting.append(block)
        if self.record is not None:
            self.record("free_requested", block.address, block.requested, block.size, block.stream)

    def _complete(self) -> None:
        """Return the blocks whose streams have passed their free."""
        blocks, self._finished = self._finished, []
        self._take_peaks()
        for block in blocks:
            block.pool.pending_count -= 1
            block.pool.pending_bytes -= block.size
            block.used_by = None
            if self.record is not None:
                self.record("free_completed", block.address, block.requested, block.size, block.stream)
            self._return(block)


def _reach(block: Block) -> int:
    """What a block of an expandable segment can grow to: best fit goes by this, so the frontier is used last."""
    beyond = block.next
    return block.size + (beyond.size if beyond is not None and beyond.state == UNMAPPED else 0)


def _nothing(size: int) -> int:
    if size < 0:
        raise ValueError(f"cannot allocate {size} bytes")
    return 0
