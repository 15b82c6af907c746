"""The segments of the caching allocator at a moment, and the map of them that shows why a request finds no place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gpt2.memory.trace import Category, Trace
from gpt2.study.figures.drawing import Sheet, bytes_axis, conditions, drawn
from gpt2.study.figures.labels import note
from gpt2.study.figures.step import asked
from gpt2.study.palette import ALARM, CACHED, CACHED_EDGE, INK, MUTED, colour, ink_on, mib, tint

_DOTTED, _DASHED = (0, (1, 1.5)), (0, (4, 2))
_ROW, _BAR = 0.25, 0.74  # inches per row of the segment map, and the share of it that is drawn
_SMALL = 7.5


class Stretch(NamedTuple):
    """A stretch of a segment: a live block with its category, or free and reserved (None)."""

    offset: int
    size: int
    category: Category | None


class Held(NamedTuple):
    """A segment at a moment, as stretches that fill it."""

    address: int
    size: int
    stretches: tuple[Stretch, ...]


def segments_before(trace: Trace, index: int, categories: Sequence[Category]) -> list[Held]:
    """The segments and what they hold just before event `index`; `categories` has one per `trace.blocks()`."""
    ranges = _ranges(trace, index)
    live = sorted((block.event.address, block.event.block_bytes, category)
                  for block, category in zip(trace.blocks(), categories, strict=True)
                  if block.born < index and (block.died is None or block.died >= index))
    held = []
    for start, size in ranges:
        stretches, at = [], start
        for address, length, category in live:
            if start <= address < start + size:
                if address > at:
                    stretches.append(Stretch(at - start, address - at, None))
                stretches.append(Stretch(address - start, length, category))
                at = address + length
        if at < start + size:
            stretches.append(Stretch(at - start, start + size - at, None))
        held.append(Held(start, size, tuple(stretches)))
    return held


@drawn
def segment_map(trace: Trace, categories: Sequence[Category], *, index: int | None = None, title: str = "",
                subtitle: str = "") -> Figure:
    """What the allocator holds when a request arrives, to scale: largest segments first, blocks by owner, holes grey.

    `index` is the event of the request: an `alloc`, or by default the trace's `oom` (ValueError if it has none). A
    segment wider than the drawing goes on in the next row.
    """
    if index is None:
        index = next((i for i, event in enumerate(trace.events) if event.action == "oom"), -1)
        if index < 0:
            raise ValueError("no request of this trace failed; name the event to look at")
    event, held = trace.events[index], segments_before(trace, index, categories)
    held.sort(key=lambda segment: (-segment.size, segment.address))
    holes = sorted(s.size for segment in held for s in segment.stretches if s.category is None)
    free, largest, request = sum(holes), holes[-1] if holes else 0, event.requested_bytes
    left = _left_on_card(trace, held)
    title = title or (f"{mib(free, 0)} are free, but in {len(holes)} holes: none takes the {mib(request)} asked for"
                      if largest < request else f"The {mib(request)} asked for fit into a hole of {mib(largest)}")
    across = max(request, left, *(segment.size for segment in held if segment.size < 3 * request), 1) * 1.012
    placed, rows = _shelve(held, across)
    sheet = Sheet(title, subtitle or conditions(trace), width=9, height=0.62 + _ROW * (rows + 4.1),
                  says=f"{len(held)} segments of {mib(sum(s.size for s in held), 0)} in all; the largest hole is "
                       f"{mib(largest)}, and {mib(left, 0)} are left on the card.")
    axes = sheet.axes(0.2, 0.5, 0.2, 0.05)
    axes.set(xlim=(0, across), ylim=(rows + 3.4, -0.6))
    _plank(axes, 0, 0, request, facecolor=tint(ALARM, 0.12), edgecolor=ALARM, linestyle=_DASHED, linewidth=1.1)
    said = f"step {event.step}: {asked(event)}" if event.step else asked(event)
    note(axes, said, request / 2, 0, ha="center", color=ALARM, halo=False)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    named = _blocks(sheet, axes, placed, across, largest)
    if left:
        _plank(axes, 0, rows + 1.6, left, facecolor="white", edgecolor=MUTED, linestyle=_DOTTED, linewidth=0.9)
        _label(sheet, axes, f"left on the card: {mib(left, 0)}", 0, rows + 1.6, left, MUTED)
    _key(sheet, axes, [c for c in Category if c not in named and any(
        s.category is c for segment in held for s in segment.stretches)], rows + 2.75)
    bytes_axis(axes.xaxis, "to scale (MiB)", ticks=8)
    return sheet.figure


def _ranges(trace: Trace, index: int) -> list[tuple[int, int]]:
    """(address, size) of the segments before event `index`, in order; mapped pages that touch are one segment."""
    own: dict[int, int] = {}
    pages: list[tuple[int, int]] = []  # mapped (start, end)
    for event in trace.events[:index]:
        start, end = event.address, event.address + event.block_bytes
        if event.action == "segment_alloc":
            own[start] = event.block_bytes
        elif event.action == "segment_free":
            own.pop(start, None)
        elif event.action == "segment_map":
            pages = _merged([*pages, (start, end)])
        elif event.action == "segment_unmap":
            pages = [part for a, b in pages for part in ((a, min(b, start)), (max(a, end), b)) if part[0] < part[1]]
    return sorted([*own.items(), *((a, b - a) for a, b in pages)])


def _merged(pages: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(pages):
        if merged and merged[-1][1] >= start:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _left_on_card(trace: Trace, held: Sequence[Held]) -> int:
    """What the driver could still give, or 0 where the trace does not know the card."""
    capacity = trace.meta.get("limit_bytes") or trace.meta.get("capacity_bytes") or 0
    return max(0, capacity - sum(segment.size for segment in held))


class _Piece(NamedTuple):
    """A part of a segment in one row of the map."""

    row: int
    left: float
    size: int
    stretches: tuple[Stretch, ...]  # offsets from the piece's own start


def _shelve(held: Sequence[Held], across: float) -> tuple[list[_Piece], int]:
    """Segments side by side, a new row where one does not fit, a longer one over several rows."""
    pieces, row, left, gap = [], 0, 0.0, 0.003 * across
    for segment in held:
        if left and left + segment.size > across:
            row, left = row + 1, 0.0
        done = 0
        while done < segment.size:
            size = min(segment.size - done, int(across - left))
            pieces.append(_Piece(row, left, size, tuple(_cut(segment.stretches, done, done + size))))
            done, left = done + size, left + size + gap
            if done < segment.size:
                row, left = row + 1, 0.0
    return pieces, row + 1


def _cut(stretches: Sequence[Stretch], start: int, end: int) -> Iterator[Stretch]:
    """The parts of the stretches that lie in [start, end), with offsets from `start`."""
    for offset, size, category in stretches:
        first, past = max(offset, start), min(offset + size, end)
        if first < past:
            yield Stretch(first - start, past - first, category)


def _plank(axes, x: float, y: float, width: float, **style) -> None:
    axes.add_patch(Rectangle((x, y - _BAR / 2), width, _BAR, clip_on=False, **style))


def _label(sheet: Sheet, axes, text: str, x: float, y: float, width: float, color: str) -> bool:
    """Write inside a plank if it fits there; whether it did."""
    scale = axes.get_position().width * sheet.width / axes.get_xlim()[1]
    if sheet.text_inches(text, _SMALL) + 0.06 > width * scale:
        return False
    note(axes, text, x + width / 2, y, ha="center", size=_SMALL, color=color, halo=False)
    return True


def _blocks(sheet: Sheet, axes, pieces: Sequence[_Piece], across: float, largest: int) -> set[Category]:
    """Draw the pieces from row 1.3 on; returns the categories whose name could be written into a block."""
    planks = [(piece.row + 1.3, piece.left + s.offset, s.size, s.category) for piece in pieces for s in piece.stretches]
    named: set[Category] = set()
    for row, left, size, category in planks:
        _plank(axes, left, row, size, facecolor=CACHED if category is None else colour(category),
               edgecolor=CACHED_EDGE if category is None else "white", linewidth=0.5 if size > 0.004 * across else 0.1)
    planks.sort(key=lambda plank: -plank[2])
    for row, left, size, category in planks:
        if category is not None and category not in named:
            if _label(sheet, axes, category.value, left, row, size, ink_on(colour(category))):
                named.add(category)
    hole = next((plank for plank in planks if plank[3] is None), None)
    if hole:
        row, left, size, _ = hole
        text = f"largest hole: {mib(largest)}" + (", two rows" if size < largest else "")
        if not _label(sheet, axes, text, left, row, size, INK):
            note(axes, text, left + size / 2, row, 0, -14, ha="center", size=_SMALL)
    return named


def _key(sheet: Sheet, axes, categories: Sequence[Category], y: float) -> None:
    """Names of the owners whose blocks are too small to hold them."""
    scale, x = axes.get_xlim()[1] / (axes.get_position().width * sheet.width), 0.0
    owners = [(colour(category), "white", category.value) for category in categories]
    for face, edge, text in [*owners, (CACHED, CACHED_EDGE, "free, reserved")]:
        axes.add_patch(Rectangle((x, y - 0.25), 0.13 * scale, 0.5, facecolor=face, edgecolor=edge, clip_on=False))
        note(axes, text, x + 0.18 * scale, y, size=_SMALL)
        x += (0.18 + sheet.text_inches(text, _SMALL) + 0.22) * scale
