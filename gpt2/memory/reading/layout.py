"""Where everything lies: the segments and the blocks in use at one moment, by address.

Replaying a history through a `Layout` says how big each block really is (a history keeps only what was *asked*), what
is free, and how big the largest free piece is. Sizes in bytes.
Source of the rules: section "split" of c10/cuda/CUDACachingAllocator.cpp; the same as in `allocator.py`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gpt2.memory.allocator import round_size
from gpt2.memory.caching.blocks import SMALL_BYTES
from gpt2.memory.trace import Trace


class Segment(NamedTuple):
    """A run of addresses that the driver gave; `expandable` ones are mapped, grow and shrink."""

    address: int
    size: int
    stream: int
    expandable: bool


@dataclass
class Layout:
    """Segments and blocks in use at one moment. Blocks are address -> size; what is between them is free."""

    divisions: tuple[int, ...] = (0,) * 16  # roundup_power2_divisions
    max_split_bytes: int = 2**63
    segments: dict[int, Segment] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)
    _starts: list[int] = field(default_factory=list)  # of segments, sorted
    _addresses: list[int] = field(default_factory=list)  # of blocks, sorted

    def add_segment(self, segment: Segment) -> None:
        """What segment_alloc and segment_map say; mapped ranges that touch become one."""
        address, size, stream, expandable = segment
        if expandable:
            before = self.segment_at(address - 1)
            if before is not None and before.expandable and before.stream == stream:
                self._drop(before)
                address, size = before.address, max(size + address - before.address, before.size)
            after = self.segments.get(address + size)
            if after is not None and after.expandable and after.stream == stream:
                self._drop(after)
                size += after.size
        if address not in self.segments:
            insort(self._starts, address)
        self.segments[address] = Segment(address, size, stream, expandable)

    def remove_segment(self, address: int, size: int) -> bool:
        """What segment_free and segment_unmap say; False if there is no such memory. Unmapping may cut one in two."""
        segment = self.segment_at(address)
        if segment is None or address + size > segment.address + segment.size:
            return False
        self._drop(segment)
        left, right = address - segment.address, segment.address + segment.size - (address + size)
        if left:
            self.add_segment(segment._replace(size=left))
        if right:
            self.add_segment(segment._replace(address=address + size, size=right))
        return True

    def fill(self, segments: Iterable[Segment], blocks: dict[int, int]) -> None:
        """Start from these, all at once."""
        self.segments = {segment.address: segment for segment in segments}
        self.blocks = dict(blocks)
        self._starts, self._addresses = sorted(self.segments), sorted(self.blocks)

    def _drop(self, segment: Segment) -> None:
        del self.segments[segment.address]
        del self._starts[bisect_left(self._starts, segment.address)]

    def segment_at(self, address: int) -> Segment | None:
        """The segment that holds `address`."""
        i = bisect_right(self._starts, address)
        if not i:
            return None
        segment = self.segments[self._starts[i - 1]]
        return segment if address < segment.address + segment.size else None

    def room_at(self, address: int) -> int:
        """Free bytes from `address` to the next block in use or the end of its segment; 0 outside every segment."""
        segment = self.segment_at(address)
        if segment is None:
            return 0
        end, i = segment.address + segment.size, bisect_left(self._addresses, address)
        return (min(end, self._addresses[i]) if i < len(self._addresses) else end) - address

    def block_size(self, address: int, requested: int) -> int:
        """The block that the allocator carves at `address` for this request: rounded, or all the room if that is not
        worth splitting."""
        size, room = round_size(requested, self.divisions), self.room_at(address)
        if room < size:  # what we believe and what happened differ: take the least that can be true
            return size
        if not self.may_hide_slack(address, size):
            return size  # every remainder is a multiple of 512, and from 512 on it is split off
        return size if room - size > SMALL_BYTES and size < self.max_split_bytes else room

    def may_hide_slack(self, address: int, size: int) -> bool:
        """Whether a block of `size` there may have up to 1 MiB to spare: not in small and expandable segments."""
        segment = self.segment_at(address)
        return segment is not None and not segment.expandable and size > SMALL_BYTES

    def put(self, address: int, size: int) -> None:
        """A block of `size` bytes comes into use."""
        if address not in self.blocks:
            insort(self._addresses, address)
        self.blocks[address] = size

    def take(self, address: int) -> int:
        """The block goes out of use; its size, 0 if there is none."""
        size = self.blocks.pop(address, 0)
        if size:
            del self._addresses[bisect_left(self._addresses, address)]
        return size

    def pieces(self) -> Iterator[tuple[Segment, list[tuple[int, int, bool]]]]:
        """Each segment by address, with its (address, size, in use) pieces: contiguous and summing to the segment."""
        for start in self._starts:
            segment, at, pieces = self.segments[start], start, []
            end = start + segment.size
            for address in self._addresses[bisect_left(self._addresses, start):bisect_left(self._addresses, end)]:
                if address > at:
                    pieces.append((at, address - at, False))
                pieces.append((address, self.blocks[address], True))
                at = address + self.blocks[address]
            if at < end:
                pieces.append((at, end - at, False))
            yield segment, pieces

    @property
    def reserved_bytes(self) -> int:
        return sum(segment.size for segment in self.segments.values())

    @property
    def allocated_bytes(self) -> int:
        return sum(self.blocks.values())

    def largest_free_bytes(self) -> int:
        """The biggest piece that a request could be served from without asking the driver."""
        return max((size for _, pieces in self.pieces() for _, size, used in pieces if not used), default=0)


def layout_at(trace: Trace, index: int) -> Layout:
    """The layout of a trace after event `index`. Blocks waiting for another stream still take their place."""
    layout = Layout()
    for event in trace.events[:index + 1]:
        action, address = event.action, event.address
        if action == "alloc":
            layout.put(address, event.block_bytes)
        elif action in ("free", "free_completed"):
            layout.take(address)
        elif action in ("segment_alloc", "segment_map"):
            layout.add_segment(Segment(address, event.block_bytes, event.stream, action == "segment_map"))
        elif action in ("segment_free", "segment_unmap"):
            layout.remove_segment(address, event.block_bytes)
    return layout


def fragmentation(trace: Trace, index: int) -> dict[str, int]:
    """Reserved, allocated and idle bytes after event `index`, and the largest free piece beside them."""
    layout = layout_at(trace, index)
    reserved, allocated = layout.reserved_bytes, layout.allocated_bytes
    return {"event": index, "reserved_bytes": reserved, "allocated_bytes": allocated,
            "idle_bytes": reserved - allocated, "largest_free_bytes": layout.largest_free_bytes()}
