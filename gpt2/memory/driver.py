"""The CUDA driver under the allocator: how much it can give, and at which address."""

from __future__ import annotations

from collections.abc import Iterable

_MIB = 2**20
PAGE_BYTES = 2 * _MIB  # the granularity at which the driver hands out device memory


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
        self._next = 0x7F00_0000_0000

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
        self.free_bytes += self._sizes.pop(address)

    def reserve(self, size: int) -> int:
        """cuMemAddressReserve: addresses without memory behind them."""
        return self._place(size)

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
        self._next -= size
        return self._next


class ReplayDriver(Driver):
    """A driver that returns recorded addresses in the order in which they were recorded."""

    def __init__(self, addresses: Iterable[int], total_bytes: int = 2**47, free_bytes_at_start: int | None = None):
        super().__init__(total_bytes, free_bytes_at_start)
        self._addresses = iter(addresses)

    def _place(self, size: int) -> int:
        try:
            return next(self._addresses)
        except StopIteration:
            raise ValueError(f"the recording has no address left for a segment of {size} bytes") from None
