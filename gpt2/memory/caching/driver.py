"""The CUDA driver under the allocator: how much it can give, and at which address.

Addresses matter because PyTorch's best fit breaks ties of size by the lowest one. Rules 1 to 3 were derived from the
segment addresses of four recordings (H200, driver 580, torch 2.11, no segment freed); rule 4 is an assumption; rule 5
was derived from those of scripts without a warm-up product; in 165 others it puts five peaks right and none wrong.

1. The driver reserves address ranges in multiples of 32 MiB, at 32 MiB boundaries, each below the one before. A
   segment of 20 MiB leaves 12 MiB of its range over, one of 1,572 MiB leaves 28.
2. A segment goes where something is left over, into the newest range with room, at the low end of what is left; only
   if no range has room is a new one reserved. So 2 MiB and 12 MiB segments lie between the big ones.
3. The context starts with a range of 416 MiB and uses 414 of it: the first small segment takes the last 2. Those 414
   come free between `model.cuda()` and the output of the first embedding, and from then on serve as left over, packed
   upwards. What frees them is not known (a token copy, an arange and an index copy run in between), so the driver has
   to be told: `release_context_range`.
4. A range all of whose segments were freed is given up, and the next new range takes the highest gap that fits.
5. A thread's cuBLAS handle, made before its workspace is allocated, takes 64 MiB of addresses. Seen where the
   workspace is the first segment in the context's left-over: it begins 64 MiB above the start. So it was on cards of
   compute capability 9; `open_cublas` has to be told.

What the rules do not know: threads and tensors of the host live in the same address space, so neighbours in time are
not always in order, and the driver takes a few MiB of left-overs for itself. Of the pairs of segments 93 to 99 % come
out in the recorded order (plain descending addresses: 57 to 95 %), and all four allocated and reserved curves exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

_MIB = 2**20
PAGE_BYTES = 2 * _MIB  # the granularity at which the driver hands out device memory
RANGE_BYTES = 32 * _MIB  # ... and at which it reserves addresses
_TOP = 0x7F00_0000_0000  # where the ranges start; only their order matters
_CONTEXT_BYTES = 414 * _MIB  # rule 3
_CUBLAS_BYTES = 64 * _MIB  # rule 5
_RESERVED_FROM = 0x3_0200_0000  # where cuMemAddressReserve starts, as recorded; upwards, at 32 MiB boundaries


class _Range:
    """Reserved addresses, and what of them is left over: (start, end) pairs in order."""

    __slots__ = ("start", "end", "left")

    def __init__(self, start: int, size: int):
        self.start, self.end = start, start + size
        self.left = [(start, start + size)]

    def take(self, size: int) -> int | None:
        """The lowest place with room for `size` bytes, or None."""
        for i, (start, end) in enumerate(self.left):
            if end - start >= size:
                self.left[i:i + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Put back what `take` took, merged with what it touches."""
        merged: list[tuple[int, int]] = []
        for place in sorted([*self.left, (start, start + size)]):
            if merged and merged[-1][1] == place[0]:
                place = (merged.pop()[0], place[1])
            merged.append(place)
        self.left = merged

    @property
    def is_empty(self) -> bool:
        return self.left == [(self.start, self.end)]


class Driver:
    """cudaMalloc, cudaFree and the virtual-memory calls, as arithmetic.

    `total_bytes` is what cudaMemGetInfo calls total, `free_bytes_at_start` what it calls free before the first
    allocation (default: all of it); both in bytes. Raises ValueError if they make no sense.
    """

    def __init__(self, total_bytes: int, free_bytes_at_start: int | None = None):
        start = total_bytes if free_bytes_at_start is None else free_bytes_at_start
        if not 0 <= start <= total_bytes:
            raise ValueError(f"free memory at start must lie between 0 and {total_bytes} bytes, not {start}")
        self.total_bytes = total_bytes
        self.free_bytes_at_start = start
        self.free_bytes = start
        self._sizes: dict[int, int] = {}
        self._ranges: list[_Range] = []  # oldest first
        self._context = self._new_range(_CONTEXT_BYTES)
        self._context_at = self._context.take(_CONTEXT_BYTES)
        self._reserved_to = _RESERVED_FROM
        self._cublas: set[object] = set()  # threads that have a handle

    def malloc(self, size: int) -> int | None:
        """cudaMalloc: the address of `size` new bytes, or None where memory is out."""
        taken = -(-size // PAGE_BYTES) * PAGE_BYTES
        if taken > self.free_bytes:
            return None
        self.free_bytes -= taken
        address = self._place(taken)
        self._sizes[address] = taken
        return address

    def free(self, address: int) -> None:
        """cudaFree. Raises KeyError for an address that `malloc` did not return."""
        size = self._sizes.pop(address)
        self.free_bytes += size
        self._displace(address, size)

    def release_context_range(self) -> None:
        """Rule 3: call it when the first forward pass begins. Addresses come free, no memory; twice does no more."""
        if self._context_at is not None:
            self._context.give(self._context_at, _CONTEXT_BYTES)
            self._context_at = None

    def open_cublas(self, thread: object) -> None:
        """Rule 5: call it when a thread has its first cuBLAS workspace made. Addresses go, no memory; twice does no
        more."""
        if thread not in self._cublas:
            self._cublas.add(thread)
            self._place(_CUBLAS_BYTES)

    def reserve(self, size: int) -> int:
        """cuMemAddressReserve: addresses without memory behind them."""
        address = self._reserved_to
        self._reserved_to += -(-size // RANGE_BYTES) * RANGE_BYTES
        return address

    def map(self, size: int) -> bool:
        """cuMemCreate and cuMemMap: physical pages for `size` bytes; False, and nothing taken, where memory is out."""
        if size > self.free_bytes:
            return False
        self.free_bytes -= size
        return True

    def unmap(self, size: int) -> None:
        """cuMemUnmap and cuMemRelease."""
        self.free_bytes += size

    def _place(self, size: int) -> int:
        for known in reversed(self._ranges):
            address = known.take(size)
            if address is not None:
                return address
        return self._new_range(size).take(size)

    def _displace(self, address: int, size: int) -> None:
        for known in self._ranges:
            if known.start <= address < known.end:
                known.give(address, size)
                if known.is_empty and known is not self._context:
                    self._ranges.remove(known)
                return

    def _new_range(self, size: int) -> _Range:
        """Reserve at the highest gap that fits, which is below everything unless a range was given up."""
        size = -(-size // RANGE_BYTES) * RANGE_BYTES
        top = _TOP
        for known in sorted(self._ranges, key=lambda r: -r.start):
            if top - known.end >= size:
                break
            top = known.start
        self._ranges.append(_Range(top - size, size))
        return self._ranges[-1]


class ReplayDriver(Driver):
    """A driver that returns recorded addresses in the order in which they were recorded."""

    def __init__(self, addresses: Iterable[int], total_bytes: int = 2**47, free_bytes_at_start: int | None = None):
        super().__init__(total_bytes, free_bytes_at_start)
        self._addresses = iter(addresses)

    def reserve(self, size: int) -> int:
        return self._place(size)

    def _place(self, size: int) -> int:
        try:
            return next(self._addresses)
        except StopIteration:
            raise ValueError(f"the recording has no address left for a segment of {size} bytes") from None

    def _displace(self, address: int, size: int) -> None:
        """A recorded address says by itself where things are."""
