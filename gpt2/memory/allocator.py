"""PyTorch's CUDA caching allocator, block for block: native and expandable segments. Pure Python, no GPU.

The driver is slow, so memory is taken from it in segments, cut into blocks, and kept. `malloc` takes the best
fitting free block, else a new segment, else it releases what is idle and tries again; `free` merges neighbours.
Source of every rule: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.6, and what changed until 2.14; replayed
recordings of a real GPU land every block on its recorded address (tests/test_allocator.py).

Not modelled: CUDA graphs, private memory pools, peer access, callbacks that free memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from gpt2.memory import expandable
from gpt2.memory.blocks import (
    ALLOCATED,
    FREE,
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    OWN_SEGMENT_BYTES,
    PENDING,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    STATE_NAMES,
    UNMAPPED,
    Block,
    Pool,
    Segment,
)
from gpt2.memory.counts import Counts, Stat
from gpt2.memory.driver import Driver, ReplayDriver
from gpt2.memory.out_of_memory import OutOfMemory, format_size
from gpt2.memory.settings import Settings, torch_version

__all__ = ["CachingAllocator", "Driver", "OutOfMemory", "ReplayDriver", "Segment", "Settings", "format_size",
           "round_size", "segment_size"]

Recorder = Callable[[str, int, int, int, int], None]  # action, address, requested bytes, block bytes, stream
_MIB = 2**20
_DEFAULT = Settings()
_NEVER = 2**63
_READINGS = ("current", "peak", "allocated", "freed")
_TOO_MUCH_BYTES = 2**60  # PyTorch refuses such a request before it looks


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


def segment_size(size: int, large_segment_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """What is asked of cudaMalloc when no block serves a rounded size, in bytes."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return large_segment_bytes
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


class CachingAllocator:
    """The allocator of one device.

    `limit_bytes` is a cap on reserved memory, as a memory fraction sets it; `torch` the version whose rules hold;
    `record` is called for every event in PyTorch's order with (action, address, requested, block bytes, stream),
    actions as in `trace.ACTIONS`.

    Other streams: a block that `record_stream` gave to another stream stays active after `free` until that stream
    has passed the free. Here the device is taken to be behind until `synchronize()`, and the block returns to its
    pool at the next `malloc` after it, or when memory runs out and PyTorch itself waits: the most memory it can take.
    """

    def __init__(self, driver: Driver, *, settings: Settings = _DEFAULT, limit_bytes: int | None = None,
                 torch: str = "2.11.0", record: Recorder | None = None):
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
            ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"), 0)
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
            return _not_live(address)
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
            return _not_live(address)
        if stream != block.stream:
            block.used_by = (block.used_by or set()) | {stream}

    def synchronize(self) -> None:
        """The device has caught up: blocks that waited for other streams return at the next `malloc`."""
        self._finished += self._waiting
        self._waiting.clear()

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
        block.state, block.used_by = PENDING, None
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
            if self.record is not None:
                self.record("free_completed", block.address, block.requested, block.size, block.stream)
            self._return(block)

    # ---- segments ----

    def _obtain(self, pool: Pool, size: int, stream: int, requested: int) -> Block:
        """No free block serves: a new segment, if need be after releasing idle ones."""
        segment = segment_size(size, self._large_segment)
        if requested >= _TOO_MUCH_BYTES:
            raise self._failure(requested, size, segment)
        over = self.limit_bytes is not None and self.reserved_bytes + segment > self.limit_bytes
        if not (over and self.settings.throw_on_cudamalloc_oom):
            if self._collects:
                self._collect_garbage()
            block = self._from_driver(pool, size, segment, stream)
            if block is None and self._release_oversize(pool, size, stream):
                block = self._from_driver(pool, size, segment, stream)
            if block is None:
                self.empty_cache()
                self._events["num_alloc_retries"] += 1
                block = self._from_driver(pool, size, segment, stream)
            if block is not None:
                return block
        self._events["num_ooms"] += 1
        if self.record is not None:
            self.record("oom", self.driver.free_bytes, requested, size, stream)
        raise self._failure(requested, size, segment)

    def _failure(self, requested: int, size: int, segment: int) -> OutOfMemory:
        return OutOfMemory(requested, size, segment, self.allocated_bytes, self.reserved_bytes, self.driver.free_bytes,
                           self.driver.total_bytes, self.limit_bytes, self.torch)

    def _from_driver(self, pool: Pool, size: int, segment: int, stream: int) -> Block | None:
        """One try. The limit is checked against a whole segment, also where only pages are mapped."""
        if self.limit_bytes is not None and self.reserved_bytes + segment > self.limit_bytes:
            return None
        if self._expandable:
            return expandable.grow(pool, size, stream, self.driver, self._moved)
        address = self.driver.malloc(segment)
        if address is None:
            return None
        pool.segments.increase(1)
        self._all.segments.increase(1)
        if segment >= self._max_split:
            self.oversize_segments.increase(1)
        self._moved(pool, "segment_alloc", address, segment, stream)
        return Block(address, segment, 0, FREE, stream, pool, None, None, None)

    def _release(self, block: Block) -> None:
        """A whole free segment goes back to the driver."""
        pool = block.pool
        pool.remove(block)
        self.driver.free(block.address)
        pool.segments.decrease(1)
        self._all.segments.decrease(1)
        if block.size >= self._max_split:
            self.oversize_segments.decrease(1)
        self._moved(pool, "segment_free", block.address, block.size, block.stream)

    def _moved(self, pool: Pool, action: str, address: int, size: int, stream: int) -> None:
        """Memory came from the driver or went back to it."""
        came = action in ("segment_alloc", "segment_map")
        self._events["num_device_alloc" if came else "num_device_free"] += 1
        for counts in (pool, self._all):
            (counts.reserved.increase if came else counts.reserved.decrease)(size)
        if self.record is not None:
            self.record(action, address, size, size, stream)

    def _collect_garbage(self) -> None:
        """Above the threshold: release whole free segments of the large pool, the longest idle first."""
        threshold = int(self.settings.garbage_collection_threshold * self.limit_bytes)
        target = self.reserved_bytes - threshold
        large = self._large
        idle = [b for b in large.free_blocks() if not b.is_split]
        ages, count = sum(large.searches - b.born for b in idle), len(idle)
        freed = -1
        while target > 0 and freed and count:
            average, freed = ages / count, 0
            for block in [b for b in large.free_blocks() if not b.is_split and b.arena is None]:
                age = large.searches - block.born
                if age >= average:
                    freed += block.size
                    ages -= age
                    count -= 1
                    self._release(block)
            target -= freed

    def _release_oversize(self, pool: Pool, size: int, stream: int) -> bool:
        """With max_split_size: release a free block as big as the request, or several from the biggest down."""
        if self.settings.max_split_size_mb is None:
            return False
        wanted = max(size, self._max_split)
        blocks = [b for _, _, b in pool.free.get(stream, ()) if b.arena is None]
        for block in blocks:
            if block.size >= wanted:
                self._release(block)
                return True
        released = 0
        for block in reversed(blocks):
            if released >= wanted or block.size < self._max_split:
                break
            released += block.size
            self._release(block)
        return released >= wanted

    def empty_cache(self) -> None:
        """Give every idle segment and page back to the driver, the large pool first, after waiting for all streams."""
        self._events["num_sync_all_streams"] += 1
        self.synchronize()
        self._complete()
        for pool in (self._large, self._small):
            blocks = pool.free_blocks()
            for block in blocks:
                if block.arena is None and not block.is_split:
                    self._release(block)
            for block in blocks:
                if block.arena is not None:
                    expandable.unmap(block, self.driver, self._moved)

    def set_fraction(self, fraction: float) -> None:
        """Limit reserved memory to this share of the card, as `set_per_process_memory_fraction`.

        1.0 lifts the limit from torch 2.11 on and is a limit of the whole card before. Raises ValueError outside 0..1.
        """
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"the memory fraction lies between 0 and 1, not {fraction}")
        whole = fraction == 1.0 and torch_version(self.torch) >= (2, 11)
        self.limit_bytes = None if whole else int(fraction * self.driver.total_bytes)

    # ---- what there is ----

    def _take_peaks(self) -> None:
        small, large, both = self._small, self._large, self._all
        both.count = small.count + large.count
        both.live_bytes = small.live_bytes + large.live_bytes
        both.requested = small.requested + large.requested
        both.pending_count = small.pending_count + large.pending_count
        both.pending_bytes = small.pending_bytes + large.pending_bytes
        small.take_peaks()
        large.take_peaks()
        both.take_peaks()
        self._rising = False

    def _take_split_peaks(self, pool: Pool) -> None:
        pool.take_split_peaks()
        splits, size = self._small.splits + self._large.splits, self._small.split_bytes + self._large.split_bytes
        if splits > self._all.peak_splits:
            self._all.peak_splits = splits
        if size > self._all.peak_split_bytes:
            self._all.peak_split_bytes = size

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks that users hold: `torch.cuda.memory_allocated()`."""
        return self._small.live_bytes + self._large.live_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the driver: `torch.cuda.memory_reserved()`."""
        return self._all.reserved.current

    @property
    def requested_bytes(self) -> int:
        """Bytes that users asked for in the blocks that are active."""
        return self._small.requested + self._large.requested

    @property
    def max_allocated_bytes(self) -> int:
        """Highest `allocated_bytes` since the peaks were reset."""
        self._take_peaks()
        return self._all.peak_live_bytes

    @property
    def max_reserved_bytes(self) -> int:
        """Highest `reserved_bytes` since the peaks were reset."""
        return self._all.reserved.peak

    def block_bytes(self, address: int) -> int:
        """Size of the live block at an address. Raises ValueError if there is none."""
        block = self._live.get(address)
        return block.size if block is not None else _not_live(address)

    def largest_free_block_bytes(self) -> int:
        """The biggest request that needs no new segment, 0 if nothing is free."""
        pools = (self._small, self._large)
        return max((free[-1][0] for pool in pools for free in pool.free.values() if free), default=0)

    def stats(self) -> dict[str, int]:
        """The flat table of `torch.cuda.memory_stats()`, same keys, sorted."""
        self._take_peaks()
        self._all.sum_up((self._small, self._large))
        table = dict(self._events)
        table["max_split_size"] = -1 if self.settings.max_split_size_mb is None else self._max_split
        for name, counts in (("all", self._all), ("small_pool", self._small), ("large_pool", self._large)):
            for title, readings in counts.readings().items():
                table.update(zip((f"{title}.{name}.{r}" for r in _READINGS), readings, strict=True))
        for title in ("oversize_allocations", "oversize_segments"):
            table.update(zip((f"{title}.{r}" for r in _READINGS), getattr(self, title).readings(), strict=True))
        return dict(sorted(table.items()))

    def reset_peak_stats(self) -> None:
        """Peaks start again from the current values."""
        self._take_peaks()
        self._all.sum_up((self._small, self._large))
        for counts in (self._all, self._small, self._large):
            counts.reset_peaks()
        self.oversize_allocations.reset_peak()
        self.oversize_segments.reset_peak()

    def reset_accumulated_stats(self) -> None:
        """Sums of what was allocated and freed, and the counts of retries, failures and driver calls, start from 0."""
        for counts in (self._small, self._large, self._all):
            counts.reset_accumulated()
        self.oversize_allocations.reset_accumulated()
        self.oversize_segments.reset_accumulated()
        self._events = dict.fromkeys(self._events, 0)

    def segments(self) -> list[Segment]:
        """What the driver gave, block by block, sorted by address; an expandable segment is one per mapped run."""
        blocks = [*self._live.values(), *self._waiting, *self._finished,
                  *self._small.free_blocks(), *self._large.free_blocks()]
        return sorted(_segment(b) for b in blocks if b.prev is None or b.prev.state == UNMAPPED)


def _segment(head: Block) -> Segment:
    rows, block = [], head
    while block is not None and block.state != UNMAPPED:
        rows.append((block.address, block.size, block.requested, STATE_NAMES[block.state]))
        block = block.next
    return Segment(head.address, sum(row[1] for row in rows), head.stream, head.pool.kind, head.arena is not None,
                   tuple(rows))


def _reach(block: Block) -> int:
    """What a block of an expandable segment can grow to: best fit goes by this, so the frontier is used last."""
    beyond = block.next
    return block.size + (beyond.size if beyond is not None and beyond.state == UNMAPPED else 0)


def _nothing(size: int) -> int:
    if size < 0:
        raise ValueError(f"cannot allocate {size} bytes")
    return 0


def _not_live(address: int) -> None:
    if address:
        raise ValueError(f"no live block at address {address:#x}")
