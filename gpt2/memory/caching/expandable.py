"""Expandable segments: one address range per stream and pool that grows and shrinks by whole pages.

Physical pages are mapped behind a range reserved for 9/8 of the card, so neighbours merge whatever their size.
Source: find_expandable_block, map_block, try_allocate_expandable_block and unmap_block of
c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.6.
"""

from __future__ import annotations

from collections.abc import Callable

from gpt2.memory.caching.blocks import FREE, UNMAPPED, Arena, Block, Pool
from gpt2.memory.caching.driver import Driver

# what the allocator does with a map or an unmap: (pool, action, address, bytes, stream)
Note = Callable[[Pool, str, int, int, int], None]


def grow(pool: Pool, size: int, stream: int, driver: Driver, note: Note) -> Block | None:
    """A free block of at least `size` bytes at the lowest address that has room, mapping what is missing.

    The block is in no list. None if the driver is out of memory; pages mapped before that stay mapped.
    """
    block = _room(pool, size, stream, driver)
    if block.state == UNMAPPED and not _map(block, min(block.size, size), driver, note):
        return None
    while block.size < size:
        missing, beyond = size - block.size, block.next
        if not _map(beyond, min(missing, beyond.size), driver, note):
            return None
        block = beyond  # it has absorbed the one before
    pool.remove(block)
    return block


def _room(pool: Pool, size: int, stream: int, driver: Driver) -> Block:
    """The first run of free and unmapped blocks that is long enough; a fresh arena if there is none."""
    for _, block in pool.unmapped.get(stream, ()):
        if block.prev is not None and block.prev.state == FREE:
            block = block.prev
        room, at = 0, block
        while room < size and at is not None and at.state in (FREE, UNMAPPED):
            room += at.size
            at = at.next
        if room >= size:
            return block
    pages = -(-(driver.total_bytes + driver.total_bytes // 8) // pool.page_bytes)
    arena = Arena(driver.reserve(pages * pool.page_bytes), pages * pool.page_bytes, pool.page_bytes)
    fresh = Block(arena.address, arena.size, 0, UNMAPPED, stream, pool, None, None, arena)
    pool.add(fresh)
    return fresh


def _map(block: Block, size: int, driver: Driver, note: Note) -> bool:
    """Put whole pages behind the first `size` bytes of an unmapped block and merge it with its free neighbours."""
    pool, arena = block.pool, block.arena
    mapped = -(-size // arena.page_bytes) * arena.page_bytes
    if not driver.map(mapped):
        return False
    pool.remove(block)
    block.state = FREE
    start = block.address
    if mapped < block.size:
        rest = Block(start + mapped, block.size - mapped, 0, UNMAPPED, block.stream, pool, None, None, arena)
        rest.splice(block, block.next)
        pool.add(rest)
        block.size = mapped
    pool.absorb(block, block.prev)
    pool.absorb(block, block.next)
    pool.add(block)
    note(pool, "segment_map", start, mapped, block.stream)
    return True


def unmap(block: Block, driver: Driver, note: Note) -> None:
    """Give back the pages that lie wholly inside a free block; what sticks out on either side stays free."""
    pool, arena = block.pool, block.arena
    page, end = arena.page_bytes, block.address + block.size
    first = arena.address + -(-(block.address - arena.address) // page) * page
    last = arena.address + (end - arena.address) // page * page
    if first >= last:
        return
    pool.remove(block)
    if first > block.address:
        head = Block(block.address, first - block.address, 0, FREE, block.stream, pool, None, None, arena)
        head.splice(block.prev, block)
        pool.add(head)
    if last < end:
        tail = Block(last, end - last, 0, FREE, block.stream, pool, None, None, arena)
        tail.splice(block, block.next)
        pool.add(tail)
    block.address, block.size, block.state = first, last - first, UNMAPPED
    pool.absorb(block, block.prev)
    pool.absorb(block, block.next)
    driver.unmap(last - first)
    note(pool, "segment_unmap", first, last - first, block.stream)
    if block.is_split:
        pool.add(block)  # else the whole arena is unmapped and its addresses are given up
