"""Where an allocator gets its memory: segments from the driver, and what is released when the driver has no more.

Source: c10/cuda/CUDACachingAllocator.cpp (alloc_block, release_cached_blocks, garbage_collect_cached_blocks).
"""

from __future__ import annotations

from collections.abc import Callable

from gpt2.memory.caching import expandable
from gpt2.memory.caching.accounts import Accounts
from gpt2.memory.caching.blocks import (
    FREE,
    LARGE_SEGMENT_BYTES,
    OWN_SEGMENT_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    Pool,
)
from gpt2.memory.caching.driver import Driver
from gpt2.memory.caching.out_of_memory import OutOfMemory
from gpt2.memory.caching.settings import torch_version

Recorder = Callable[[str, int, int, int, int], None]  # action, address, requested bytes, block bytes, stream
_TOO_MUCH_BYTES = 2**60  # PyTorch refuses such a request before it looks


def segment_size(size: int, large_segment_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """What is asked of cudaMalloc when no block serves a rounded size, in bytes."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return large_segment_bytes
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


class Reserve(Accounts):
    """The segments of one device. A block that nobody could serve is obtained here, or the request fails."""

    driver: Driver
    torch: str
    record: Recorder | None
    limit_bytes: int | None
    _expandable: bool
    _collects: bool
    _large_segment: int

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
        return OutOfMemory(
            requested,
            size,
            segment,
            self.allocated_bytes,
            self.reserved_bytes,
            self.driver.free_bytes,
            self.driver.total_bytes,
            self.limit_bytes,
            self.torch,
        )

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
