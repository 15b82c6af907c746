"""Temporary storage of CUB's algorithms, as PyTorch builds them with CUDA 13: bytes that one call asks for.

CUB lays its parts out one after another, each rounded to 256 bytes, and adds 255 to align the first
(util_device.cuh, alias_temporaries). PyTorch counts items in int64. Sources below are in CCCL's cub/.
"""

from __future__ import annotations

import math

PART = 256
SMEM = 48 * 1024


def _parts(*sizes: int) -> int:
    return sum(-(-size // PART) * PART for size in sizes) + PART - 1


def _scaled(threads: int, items: int, size: int) -> tuple[int, int]:
    """(threads, items) of a block for values of `size` bytes, given those for 4 bytes. scale_reg_bound."""
    items = max(1, items * 4 // max(4, size))
    return min(threads, -(-SMEM // (size * items) // 32) * 32), items


def _onesweep_tile(key: int, value: int, capability: tuple[int, int], real: bool) -> int:
    """Items a block of the onesweep pass sorts. device/dispatch/tuning/tuning_radix_sort.cuh."""
    widest = max(key, value)
    if capability < (9, 0):
        items = 17 if key == 4 and value else 21
    elif key == 8:
        items = 24 if value == 8 else 30
    elif key == 4:
        items = (29 if value == 8 else 17) if value else 19 - real
    else:  # 2 or 1 bytes with 8-byte values or none
        items = {(2, 8): 23, (1, 8): 18}.get((key, value), 19)
    threads = 512 if key == 2 or not value and key == 1 else 384
    threads, items = _scaled(threads, items, widest)
    return threads * items


def radix_sort(
    n: int, capability: tuple[int, int], *, key: int = 8, value: int = 8, bits: int | None = None, real: bool = False
) -> int:
    """Sorting n keys by their lowest `bits`, with values or without (0).

    device/dispatch/dispatch_radix_sort.cuh: one block sorts up to a single tile and needs nothing; else the histogram
    of every 8-bit pass, look-back state, and a second buffer for keys and values if there is more than one pass.
    """
    threads, items = _scaled(256, 19, max(key, value))
    if n <= threads * items:
        return 1
    passes = math.ceil((8 * key if bits is None else bits) / 8)
    buffers = n if passes > 1 else 0
    blocks = math.ceil(n / _onesweep_tile(key, value, capability, real))
    return _parts(passes * 256 * 8, blocks * 1024, buffers * key, buffers * value, passes * 4)


def scan(n: int, size: int = 8, tile: int | None = None) -> int:
    """A running sum of n values of `size` bytes: look-back state of every tile and one warp more.

    agent/single_pass_scan_operators.cuh: status and value in one word, 8 bytes up to 4-byte values, 16 for 8; a tile is
    128 threads by 15 four-byte items. It is laid out twice, inside and outside.
    """
    tile = tile or math.prod(_scaled(128, 15, size))
    return _parts(_parts((16 if size == 8 else 8) * (math.ceil(n / tile) + 32)))


def scan_by_key(n: int) -> int:
    """Sums of uint32 within runs of equal keys: 16 bytes of state a tile of 128 x 8 at least."""
    return _parts(_parts(16 * (math.ceil(n / 1024) + 32)))


def unique_by_key(n: int, capability: tuple[int, int]) -> int:
    """The first of each run of n int64 keys, with its place. tuning_unique_by_key.cuh: key and value of 8 bytes."""
    return scan(n, tile=448 * 11 if capability >= (9, 0) else 192 * 7)


def total(n: int, gpu) -> int:
    """A sum of n int32: one block up to a tile, else a partial sum of each of at most 5 blocks for each that fits.

    device/dispatch/dispatch_reduce.cuh: blocks of 256 x 16; the subscription factor is 5.
    """
    threads, items = 256, 16
    return 1 if n <= threads * items else _parts(4 * 5 * gpu.sms * (gpu.threads_per_sm // threads))


def select(n: int, capability: tuple[int, int]) -> int:
    """Those of n int64 that are flagged: look-back state of every tile. tuning_select_if.cuh: flagged, 8 bytes."""
    tile = 384 * 11 if capability >= (9, 0) else 384 * 6 if capability >= (8, 0) else 128 * 5
    return scan(n, size=4, tile=tile)
