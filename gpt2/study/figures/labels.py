"""Labels that stand beside what they name and keep out of each other's way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.patheffects import withStroke

from gpt2.memory.trace import Category
from gpt2.study.figures.drawing import Sheet
from gpt2.study.palette import FAINT, INK, MARKERS, MIB, MUTED, colour, number

_COORDINATES = {"data": "data", "axes": "axes fraction", "y": ("axes fraction", "data"), "x": ("data", "axes fraction")}


def note(axes: Axes, text: str, x: float, y: float, dx: float = 0, dy: float = 0, *, of: str = "data",
         halo: bool = True, **style) -> None:
    """Text `dx`, `dy` points from a place: of the data, of the axes, or (of="y") a share of the width and a value.

    The halo keeps lines behind the text apart from it; inside a coloured shape there is none.
    """
    written = axes.annotate(text, (x, y), xycoords=_COORDINATES[of], xytext=(dx, dy), textcoords="offset points",
                            **{"size": 8, "va": "center", "linespacing": 1.3, "zorder": 6, **style})
    if halo:
        written.set_path_effects([withStroke(linewidth=2, foreground="white")])


def owners(timeline: pd.DataFrame) -> pd.DataFrame:
    """The columns of a timeline that are categories, in their order."""
    return timeline[[category.value for category in Category if category.value in timeline]]


def pointer(colour: str = INK) -> dict:
    """A thin line from a note to its place."""
    return {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 0}


def marker(kind: str) -> dict:
    """How points of one kind of number look; more words may follow the kind: `predicted, A40`."""
    kind = kind.replace(",", " ").split()[0]
    hollow = kind == "published"
    return {"marker": MARKERS[kind], "markersize": 6.5 if hollow else 8, "markerfacecolor": "none" if hollow else INK,
            "markeredgewidth": 1.1}


def marker_key(axes: Axes, kinds: Sequence[str], x: float, y: float) -> None:
    """Which mark is which kind of number, in a free corner of the axes."""
    for i, kind in enumerate(kinds):
        at = y - 0.065 * i
        axes.plot(x, at, transform=axes.transAxes, color=INK, linestyle="", clip_on=False, **marker(kind))
        note(axes, kind.replace("measured", "recorded"), x, at, 8, of="axes")


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions as near as possible to the wanted ones (least squares), at least `gap` apart, inside [low, high].

    `wanted` must ascend; where there is no room the gap shrinks.
    """
    count = len(wanted)
    gap = min(gap, (high - low) / max(count - 1, 1))
    pools: list[list[float]] = []  # [sum, count] of neighbours that move together
    for i, value in enumerate(wanted):
        pools.append([value - i * gap, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, size = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += size
    means = [total / size for total, size in pools for _ in range(int(size))]
    return [min(max(mean, low), high - (count - 1) * gap) + i * gap for i, mean in enumerate(means)]


def spans(labels: Iterable[str]) -> list[tuple[str, int, int]]:
    """Runs of equal labels as (label, first, past the last)."""
    runs: list[tuple[str, int, int]] = []
    for i, label in enumerate(labels):
        if runs and runs[-1][0] == label:
            runs[-1] = (label, runs[-1][1], i + 1)
        else:
            runs.append((label, i, i + 1))
    return runs


def name_spans(sheet: Sheet, axes: Axes, runs: Sequence[tuple[str, float, float]], y: float = 1.015) -> None:
    """Names of phases above the axes, with a thin line at each border; what does not fit stays unnamed."""
    scale = axes.get_position().width * sheet.width / (axes.get_xlim()[1] - axes.get_xlim()[0])
    for name, start, end in runs:
        if start > axes.get_xlim()[0]:
            axes.axvline(start, color=FAINT, linewidth=0.7, zorder=0.5)
        if (end - start) * scale > sheet.text_inches(name, 8) + 0.03:
            axes.text((start + end) / 2, y, name, transform=axes.get_xaxis_transform(), ha="center", va="bottom",
                      size=8, color=MUTED)


def place(sheet: Sheet, axes: Axes, points: Sequence[tuple[float, float]], texts: Sequence[str], *,
          size: float = 8, avoid: Sequence[tuple[float, float]] = ()) -> None:
    """A label beside each point, where it covers no point, no other label, nothing to `avoid`; a line if it is far."""
    pixel = axes.figure.dpi / 72
    spots = axes.transData.transform(np.asarray(points, float))
    frame = axes.get_window_extent(sheet.renderer)
    taken = [(x - 5 * pixel, y - 5 * pixel, x + 5 * pixel, y + 5 * pixel) for x, y in spots]
    beside = [(x - 18 * pixel, y - 5 * pixel, x + 18 * pixel, y + 5 * pixel) for x, y in spots]  # reads as its label
    taken += [(x - pixel, y - pixel, x + pixel, y + pixel) for x, y in map(axes.transData.transform, avoid)]
    for i, ((x, y), text) in enumerate(zip(spots, texts, strict=True)):
        others = taken + beside[:i] + beside[i + 1:]
        width, height, _ = sheet.renderer.get_text_width_height_descent(text, FontProperties(size=size), False)
        best = min(_candidates(x, y, width, height, pixel), key=lambda c: _badness(c, others, frame))
        box, distance = best
        taken.append(box)
        at = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        edge = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
        inverse = axes.transData.inverted()
        if distance > 1:
            (x0, y0), (x1, y1) = inverse.transform([(x, y), edge])
            axes.plot([x0, x1], [y0, y1], color=FAINT, linewidth=0.7, zorder=1)
        axes.text(*inverse.transform(at), text, ha="center", va="center", size=size)


def _candidates(x, y, width, height, pixel):
    """Boxes around a point, near ones first: right, left, above, below, the corners, then further out."""
    for distance in (1, 2.2, 3.6, 5.2):
        reach = 7 * pixel * distance
        for dx, dy in ((1, 0), (1, 0.8), (1, -0.8), (-1, 0), (-1, 0.8), (-1, -0.8), (0, 1), (0, -1)):
            left = x + dx * reach - (width if dx < 0 else width / 2 if dx == 0 else 0)
            middle = y + dy * reach * (1 if dx else 1.3)
            yield (left, middle - height / 2 - pixel, left + width, middle + height / 2 + pixel), distance


def _badness(candidate, taken, frame) -> float:
    (left, bottom, right, top), distance = candidate
    covered = sum(max(0, min(right, x1) - max(left, x0)) * max(0, min(top, y1) - max(bottom, y0))
                  for x0, y0, x1, y1 in taken)
    outside = max(0, frame.x0 - left) + max(0, right - frame.x1) + max(0, frame.y0 - bottom) + max(0, top - frame.y1)
    return covered + 50 * outside + distance


def ledger_bar(sheet: Sheet, axes: Axes, kept: pd.Series, heading: str, shown: Iterable[str] = ()) -> None:
    """A bar right of the axes, at their scale, whose labels name every owner and its bytes. It takes 2.6 inches.

    Owners in `shown` are named even if they hold nothing then: the label is the key to their colour in the axes.
    """
    shown = set(shown)
    box = axes.get_position()
    bar = sheet.figure.add_axes((box.x1 + 0.2 / sheet.width, box.y0, 0.3 / sheet.width, box.height))
    bar.set(xlim=(0, 1), ylim=axes.get_ylim())
    bar.set_axis_off()
    parts = [(category, kept[category.value]) for category in Category
             if kept.get(category.value, 0) > 0 or category.value in shown]
    middles = np.cumsum([size for _, size in parts]) - np.array([size for _, size in parts]) / 2
    top = axes.get_ylim()[1]
    per_inch = top / (box.height * sheet.height)
    rows = spread(middles, 0.17 * per_inch, 0.06 * per_inch, top - 0.06 * per_inch)
    total, floor = kept.sum(), 0.0
    for (category, size), middle, row in zip(parts, middles, rows, strict=True):
        if size:
            bar.bar(0.5, size, 1, floor, color=colour(category), linewidth=0)
        bar.plot([1, 1.35, 1.65, 1.85], [middle, middle, row, row], color=colour(category), linewidth=1, clip_on=False)
        bar.text(1.95, row, category.value, size=8, va="center")
        amount = number(size / MIB, 0 if size >= 100 * MIB else 1) if size >= 0.05 * MIB else "< 0.1" if size else "0"
        bar.text(7.25, row, amount, size=8, va="center", ha="right")
        share = f"{size / total:.0%}" if size >= 0.005 * total else ""
        bar.text(8.25, row, share, size=8, va="center", ha="right", color=MUTED)
        floor += size
    note(bar, f"{heading}, MiB", 0, 1, 0, 5, of="axes", va="bottom", color=MUTED)


def thin_ticks(sheet: Sheet, axes: Axes, values: Sequence[float]) -> None:
    """Ticks of the x axis at these values, without those whose labels would touch their right neighbour."""
    scale = axes.get_position().width * sheet.width / (axes.get_xlim()[1] - axes.get_xlim()[0])
    kept: list[float] = []
    for value in sorted(set(values), reverse=True):
        if not kept or (kept[-1] - value) * scale > 0.42:
            kept.append(value)
    axes.set_xticks(kept, [f"{n:,}" for n in kept])
