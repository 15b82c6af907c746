"""What the allocator counts, and the flat table `torch.cuda.memory_stats()` makes of it.

What changes with every event is a bare integer in `Counts` (a pool is one); peaks are taken when counting turns
from up to down, which reads the same as taking them at every step. What changes with segments is a `Stat`.
Source: section "stats" of c10/core/CachingDeviceAllocator.h and torch/csrc/cuda/Module.cpp, PyTorch 2.6 and 2.11.
"""

from __future__ import annotations

_BUSY = ("count", "live_bytes", "requested", "splits", "split_bytes")
_NAMES = {"count": "allocation", "live_bytes": "allocated_bytes", "requested": "requested_bytes",
          "splits": "inactive_split", "split_bytes": "inactive_split_bytes"}
_SUMMED = (*(p + x for p in ("", "freed_", "base_") for x in _BUSY),
           "pending_count", "pending_bytes", "base_pending_count", "base_pending_bytes")


class Stat:
    """A counter with the four readings of `torch.cuda.memory_stats()`."""

    __slots__ = ("current", "peak", "allocated", "freed")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def increase(self, amount: int) -> None:
        self.current += amount
        self.allocated += amount
        if self.current > self.peak:
            self.peak = self.current

    def decrease(self, amount: int) -> None:
        self.current -= amount
        self.freed += amount

    def readings(self) -> tuple[int, int, int, int]:
        """current, peak, allocated, freed."""
        return self.current, self.peak, self.allocated, self.freed

    def reset_peak(self) -> None:
        self.peak = self.current

    def reset_accumulated(self) -> None:
        self.allocated = self.freed = 0


class Counts:
    """Blocks and bytes in use, and in unused pieces of segments, of one pool or of all.

    `x` is the current value, `freed_x` the sum of all decreases, `peak_x` the highest, `base_x` the value when the
    sums were last reset. Pending blocks (freed, but another stream may use them) are in `requested` and `pending_*`,
    not in `count` and `live_bytes`; active is live plus pending.
    """

    __slots__ = (*(p + x for p in ("", "freed_", "peak_", "base_") for x in _BUSY),
                 "pending_count", "pending_bytes", "base_pending_count", "base_pending_bytes",
                 "peak_active_count", "peak_active_bytes", "segments", "reserved")

    def __init__(self) -> None:
        for name in Counts.__slots__[:-2]:
            setattr(self, name, 0)
        self.segments, self.reserved = Stat(), Stat()

    def sum_up(self, pools: tuple[Counts, ...]) -> None:
        """Set currents and sums to those of the pools together; peaks and Stats are this one's own."""
        for name in _SUMMED:
            setattr(self, name, sum(getattr(pool, name) for pool in pools))

    def take_peaks(self) -> None:
        """Note the current values as peaks where they are higher."""
        if self.count > self.peak_count:
            self.peak_count = self.count
        if self.live_bytes > self.peak_live_bytes:
            self.peak_live_bytes = self.live_bytes
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        if self.pending_count:
            self.peak_active_count = max(self.peak_active_count, self.count + self.pending_count)
            self.peak_active_bytes = max(self.peak_active_bytes, self.live_bytes + self.pending_bytes)

    def take_split_peaks(self) -> None:
        if self.splits > self.peak_splits:
            self.peak_splits = self.splits
        if self.split_bytes > self.peak_split_bytes:
            self.peak_split_bytes = self.split_bytes

    def reset_peaks(self) -> None:
        for name in _BUSY:
            setattr(self, f"peak_{name}", getattr(self, name))
        self.peak_active_count = self.count + self.pending_count
        self.peak_active_bytes = self.live_bytes + self.pending_bytes
        self.segments.reset_peak()
        self.reserved.reset_peak()

    def reset_accumulated(self) -> None:
        """Sums start again from 0."""
        for name in _BUSY:
            setattr(self, f"base_{name}", getattr(self, name))
            setattr(self, f"freed_{name}", 0)
        self.base_pending_count, self.base_pending_bytes = self.pending_count, self.pending_bytes
        self.segments.reset_accumulated()
        self.reserved.reset_accumulated()

    def readings(self) -> dict[str, tuple[int, int, int, int]]:
        """PyTorch's name of each statistic -> current, peak, allocated, freed."""
        self.take_peaks()
        table = {"segment": self.segments.readings(), "reserved_bytes": self.reserved.readings()}
        for name, title in _NAMES.items():
            current, freed = getattr(self, name), getattr(self, f"freed_{name}")
            made = current + freed - getattr(self, f"base_{name}")
            table[title] = (current, getattr(self, f"peak_{name}"), made, freed)
        for name, title, x in (("allocation", "active", "count"), ("allocated_bytes", "active_bytes", "bytes")):
            current, peak, made, freed = table[name]
            pending = getattr(self, f"pending_{x}")
            table[title] = (current + pending, max(peak, getattr(self, f"peak_active_{x}")), made,
                            freed - pending + getattr(self, f"base_pending_{x}"))
        return table
