"""What an allocator holds, and held at most: what `torch.cuda.memory_stats()` and a snapshot's segments say."""

from __future__ import annotations

from gpt2.memory.caching.blocks import STATE_NAMES, UNMAPPED, Block, Pool, Segment
from gpt2.memory.caching.counts import Counts, Stat
from gpt2.memory.caching.settings import Settings

_READINGS = ("current", "peak", "allocated", "freed")


class Accounts:
    """The books of one device: two pools, the blocks users hold, and counts with their peaks."""

    _small: Pool
    _large: Pool
    _all: Counts
    _live: dict[int, Block]
    _rising: bool  # counts went up since the peaks were last taken
    _events: dict[str, int]
    _max_split: int
    settings: Settings
    oversize_allocations: Stat
    oversize_segments: Stat

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
        return block.size if block is not None else not_live(address)

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
        blocks = [
            *self._live.values(),
            *self._waiting,
            *self._finished,
            *self._small.free_blocks(),
            *self._large.free_blocks(),
        ]
        return sorted(_segment(b) for b in blocks if b.prev is None or b.prev.state == UNMAPPED)


def _segment(head: Block) -> Segment:
    rows, block = [], head
    while block is not None and block.state != UNMAPPED:
        rows.append((block.address, block.size, block.requested, STATE_NAMES[block.state]))
        block = block.next
    return Segment(
        head.address, sum(row[1] for row in rows), head.stream, head.pool.kind, head.arena is not None, tuple(rows)
    )


def not_live(address: int) -> None:
    """ValueError for an address at which no live block starts; 0 is nobody's and passes."""
    if address:
        raise ValueError(f"no live block at address {address:#x}")
