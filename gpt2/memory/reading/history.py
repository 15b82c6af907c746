"""From a recorded history and its end to a trace: what was there before it began, and how big each block was.

Sizes in bytes. What a history gives is in `snapshot`; the split rule is in `layout`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from gpt2.memory.allocator import round_size
from gpt2.memory.caching.blocks import SMALL_BYTES
from gpt2.memory.reading.layout import Layout, Segment
from gpt2.memory.trace import Event

BEFORE = "before the recording"  # the phase of what was there when the history begins


class Entry(NamedTuple):
    """One event as the file has it; `size` is what was asked, for segments their size.

    `labels` is empty, or step, phase, module, operator and category: the files that `viewer` writes have them.
    """

    action: str
    address: int
    size: int
    stream: int
    stack: int
    labels: tuple = ()


class Known(NamedTuple):
    """A block in use at the end of the history, as the segments list it."""

    size: int
    requested: int
    stream: int
    stack: int
    pending: bool


class Older(NamedTuple):
    """A block whose birth is not in the history."""

    requested: int
    stream: int
    stack: int
    freed: int  # index of the entry that frees it, -1 for none
    pending: bool  # freed before the history began, and waiting for another stream when it did


class History:
    """Entries between a beginning that has to be found and an end that is known."""

    def __init__(self, entries: list[Entry], segments: list[Segment], final: dict[int, Known], layout: Layout,
                 warnings: list[str], cut: str = ""):
        self.entries, self.final, self.layout, self.warnings = entries, final, layout, warnings
        self.older: dict[int, Older] = {}  # by address
        self.exact: dict[int, int] = {}  # size of the block that entry i made, where the end still has it
        self.cut = cut  # why we think that the ring wrapped
        self._find_older()
        self.layout.fill(self._segments_at_start(segments), {})

    def _find_older(self) -> None:
        """Blocks that are freed, or are there at the end, and whose birth is not in the history."""
        live: dict[int, int] = {}
        for i, (action, address, size, stream, *_) in enumerate(self.entries):
            if action == "alloc":
                live[address] = i
            elif action == "free_requested" and address not in live:
                self.older.setdefault(address, Older(size, stream, -1, i, False))
                self.cut = self.cut or ("it begins with the free of a block it does not know" if i == 0 else "")
            elif action == "free_completed":
                if live.pop(address, None) is None and address not in self.older:
                    self.older[address] = Older(size, stream, -1, i, True)
                    self.cut = "it begins in the middle of a free"
        for address, known in self.final.items():
            if address in live:
                self.exact[live[address]] = known.size
            elif address not in self.older:
                self.older[address] = Older(known.requested, known.stream, known.stack, -1, known.pending)
                self.cut = "blocks are there whose birth was recorded and is gone" if known.stack >= 0 else self.cut

    def _segments_at_start(self, segments: list[Segment]) -> Iterable[Segment]:
        """The final segments with every event on them undone, latest first."""
        layout, lost = Layout(), 0
        layout.fill(segments, {})
        for action, address, size, stream, *_ in reversed(self.entries):
            if action in ("segment_alloc", "segment_map"):
                lost += not layout.remove_segment(address, size)
            elif action in ("segment_free", "segment_unmap"):
                layout.add_segment(Segment(address, size, stream, action == "segment_unmap"))
        if lost:
            self.warnings.append(f"{lost} segments of the history are not where the end has them")
        return list(layout.segments.values())

    def events(self) -> list[Event]:
        """What was there, then what happened, each block with its size."""
        events = [Event("segment_map" if s.expandable else "segment_alloc", s.address, s.size, s.size, s.stream,
                        phase=BEFORE) for s in sorted(self.layout.segments.values())]
        for address, size in self._place_older():
            requested, stream, stack, _, pending = self.older[address]
            events += [Event(action, address, requested, size, stream, phase=BEFORE, stack=stack)
                       for action in (("alloc", "free_requested") if pending else ("alloc",))]
        i, entries = 0, self.entries
        while i < len(entries):
            entry = entries[i]
            both = (entry.action == "free_requested" and i + 1 < len(entries)
                    and entries[i + 1].action == "free_completed" and entries[i + 1].address == entry.address)
            i += 2 if both else 1
            events.append(self._event(i - 1, entry, "free" if both else entry.action))
        self._report()
        return events

    def _event(self, i: int, entry: Entry, action: str) -> Event:
        address, size, layout = entry.address, entry.size, self.layout
        block = size
        if action == "alloc":
            block = self.exact.get(i) or layout.block_size(address, size)
            layout.put(address, block)
        elif action in ("free", "free_completed"):
            block = layout.take(address) or round_size(size, layout.divisions)
        elif action == "free_requested":
            block = layout.blocks.get(address) or round_size(size, layout.divisions)
        elif action in ("segment_alloc", "segment_map"):
            layout.add_segment(Segment(address, size, entry.stream, action == "segment_map"))
        elif action in ("segment_free", "segment_unmap"):
            layout.remove_segment(address, size)
        step, phase, module, operator, category = entry.labels or (0, "", "", "", "")
        return Event(action, address, size, block, entry.stream, step, phase, module, operator, category=category,
                     stack=entry.stack)

    def _place_older(self) -> list[tuple[int, int]]:
        """(address, size) of what was there, put into the layout. A block that died in the history left no size: if
        its request is followed by free memory, it reaches to where, while it lived, another block was born."""
        born = sorted((e.address, i) for i, e in enumerate(self.entries) if e.action == "alloc")
        uncertain = 0
        for address in sorted(self.older, reverse=True):  # downwards, so that the room above is known
            requested, _, _, freed, _ = self.older[address]
            if freed < 0:
                size = self.final[address].size
            else:
                size, room = self.layout.block_size(address, requested), self.layout.room_at(address)
                if self.layout.may_hide_slack(address, size) and size < room:
                    size, sure = self._reach(address, size, freed, born)
                    uncertain += not sure
            self.layout.put(address, size)
        if uncertain:
            self.warnings.append(f"{uncertain} blocks older than the history may be up to 1 MiB larger than counted")
        return sorted(self.layout.blocks.items())

    @staticmethod
    def _reach(address: int, rounded: int, freed: int, born: list[tuple[int, int]]) -> tuple[int, bool]:
        """How far the block can reach: to the first address at which, while it lived, another was born."""
        for at in range(bisect_left(born, (address + rounded, -1)), len(born)):
            start, when = born[at]
            if start > address + rounded + SMALL_BYTES:
                break
            if when < freed:
                return start - address, True
        return rounded, False

    def _report(self) -> None:
        older = len(self.older)
        if self.cut:
            self.warnings.append(
                f"the ring of events wrapped ({self.cut}): {older} blocks were already there; they are counted, but "
                "who asked for those that died is lost (record with a larger max_entries, or from the start)")
        elif older:
            self.warnings.append(f"the recording began when {older} blocks were already there; they have no stack")
        wrong = sum(1 for a, known in self.final.items() if self.layout.blocks.get(a) != known.size)
        if wrong or len(self.final) != len(self.layout.blocks):
            self.warnings.append("history and segments disagree at the end: "
                                 f"{len(self.layout.blocks)} blocks by the one, {len(self.final)} by the other")
