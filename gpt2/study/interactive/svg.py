"""The walk's picture, written by hand: a mountain that stays, and a bar, a cursor and a lens that move with the slider.

`draw(walk, i)` is a pure function and takes microseconds, which a plotting library does not.
"""

from __future__ import annotations

from html import escape

import numpy as np

from gpt2.study.interactive.walk import Walk
from gpt2.study.palette import ALARM, COLOURS, MIB, MUTED, number

WIDTH, HEIGHT = 430, 262
LEFT, RIGHT, TOP, BOTTOM = 48, 352, 24, 240  # of the mountain
BAR_LEFT, BAR_WIDTH = 378, 34
LENS_HEIGHT, LENS_REACH = 74, 40
_COLUMNS = 304


def scale(walk: Walk) -> float:
    """Pixels per byte."""
    return (BOTTOM - TOP) / (1.04 * max(walk.totals))


def across(walk: Walk, i: float) -> float:
    """The x of event `i`."""
    return LEFT + (RIGHT - LEFT) * (i + 0.5) / len(walk)


def mountain(walk: Walk) -> str:
    """What does not move: the stacked step, axes, readings, blind spot and moments, as SVG elements."""
    k, columns = scale(walk), _columns(walk)
    edges, tops = [across(walk, i) for i in columns], walk.stacks[columns].cumsum(axis=1)
    layers = []  # painted from the top owner down, each to the floor: half the points of bands
    for j in range(len(walk.categories) - 1, -1, -1):
        if walk.stacks[columns, j].any():
            layers.append(f'<path d="M{edges[0]:.0f} {BOTTOM}{_ridge(edges, BOTTOM - k * tops[:, j])}V{BOTTOM}Z" '
                          f'fill="{COLOURS[walk.categories[j]]}"/>')
    return _ground(walk, k) + "".join(layers) + _marks(walk, k)


def moving(walk: Walk, i: int) -> str:
    """What moves: the cursor, and the bar of the moment stacked by owner."""
    k, x, y, parts = scale(walk), across(walk, i), float(BOTTOM), []
    for j, category in enumerate(walk.categories):
        height = k * walk.stacks[i, j]
        y -= height
        if height > 0:
            parts.append(f'<rect x="{BAR_LEFT}" y="{y:.2f}" width="{BAR_WIDTH}" height="{height:.2f}" '
                         f'fill="{COLOURS[category]}"/>')
    cursor = f'<path d="M{x:.1f} {TOP - 4}V{BOTTOM}M{x:.1f} {y:.1f}H{BAR_LEFT}" stroke="currentColor" fill="none"/>'
    return "".join(parts) + cursor + f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="currentColor"/>'


def lens(walk: Walk, i: int) -> str:
    """The events around `i`, magnified: the curve, and what this event added or freed in its owner's colour."""
    low, high = max(0, i - LENS_REACH), min(len(walk), i + LENS_REACH + 1)
    y = walk.totals[low:high]
    least, most = min(y), max(y)
    k = (LENS_HEIGHT - 12) / max(most - least, 1)
    wide = (RIGHT - LEFT) / (2 * LENS_REACH + 1)
    x0 = LEFT + (low - i + LENS_REACH) * wide
    levels = [LENS_HEIGHT - 4 - k * (value - least) for value in y]
    path = f"M{x0:.1f} {levels[0]:.1f}" + "".join(f"H{x0 + n * wide:.1f}V{level:.1f}" for n, level in enumerate(levels))
    before = LENS_HEIGHT - 4 - k * ((walk.totals[i - 1] if i else y[0]) - least)
    colour = COLOURS[walk.blocks[i][1]] if i in walk.blocks else MUTED
    at, now = LEFT + LENS_REACH * wide, levels[i - low]
    return (f'<path d="{path}H{x0 + len(levels) * wide:.1f}" fill="none" stroke="currentColor" stroke-opacity=".55"/>'
            f'<rect x="{at - 1.5:.1f}" y="{min(before, now):.1f}" width="4" height="{max(abs(now - before), 1.5):.1f}" '
            f'fill="{colour}" stroke="currentColor" stroke-width=".5"/>'
            f'<text x="{LEFT - 5}" y="{LENS_HEIGHT - 2}" class="tick">{number(least / MIB, 0)}</text>'
            f'<text x="{LEFT - 5}" y="13" class="tick">{number(most / MIB, 0)}</text>'
            f'<text x="{RIGHT + 6}" y="{LENS_HEIGHT - 2}">±{LENS_REACH} events</text>')


def owners(walk: Walk, i: int) -> str:
    """The bar in words: each owner's MiB, in the order of the stack from the top, as table rows."""
    rows = [f'<tr><td><i style="background:{COLOURS[category]}"></i>{category.value}</td>'
            f"<td>{number(size / MIB)}</td></tr>"
            for category, size in zip(reversed(walk.categories), reversed(walk.stacks[i].tolist()), strict=True)]
    return "".join(rows)


def words(walk: Walk, i: int) -> str:
    """What happens at event `i`, and the counter after it."""
    where, what, who = walk.words(i)
    total, high = walk.totals[i], walk.totals[walk.peak]
    unseen = walk.blind[0] <= i < walk.blind[1] and total > walk.highest_reading
    return (f"<b>{number(total / MIB)} MiB allocated</b><span>{escape(where)}</span><span>{escape(what)}</span>"
            f"<span>{escape(who)}</span><em>{_verdict(i == walk.peak, unseen, high - walk.highest_reading)}</em>")


def draw(walk: Walk, ground: str, i: int) -> str:
    """The whole picture of event `i` as HTML; `ground` is `mountain(walk)`, which is the same for all."""
    magnified = f'<svg viewBox="0 0 {WIDTH} {LENS_HEIGHT}" class="lens">{lens(walk, i)}</svg>'
    return (f'<div class="walk"><div class="picture"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="memory during the step, stacked by owner">{ground}{moving(walk, i)}</svg>{magnified}</div>'
            f'<div class="beside"><div class="words">{words(walk, i)}</div><table>{owners(walk, i)}</table></div>'
            "</div>")


def _verdict(at_peak: bool, unseen: bool, missed: int) -> str:
    if at_peak:
        return f"the peak: {number(missed / MIB, 0)} MiB above every reading" if missed > 0 else "the peak"
    return "blind spot: no reading sees this" if unseen else "&nbsp;"


def _columns(walk: Walk) -> list[int]:
    """One event per pixel, the highest of those that share it, so that no spike is lost."""
    groups = np.array_split(np.arange(len(walk)), min(_COLUMNS, len(walk)))
    totals = np.asarray(walk.totals)
    return [int(group[totals[group].argmax()]) for group in groups]


def _ridge(edges: list[float], heights: np.ndarray) -> str:
    """A line through the points, without those that lie level between their neighbours."""
    y = [f"{value:.1f}" for value in heights]
    kept = [n for n in range(len(y)) if n in (0, len(y) - 1) or not y[n - 1] == y[n] == y[n + 1]]
    return "".join(f"L{edges[n]:.0f} {y[n]}" for n in kept)


def _ground(walk: Walk, k: float) -> str:
    """Axis, grid and the blind spot, behind the mountain."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 10**9)
                if max(walk.totals) / MIB / s < 5)
    levels = [n * step for n in range(int(max(walk.totals) / MIB / step) + 1)]
    lines = "".join(f'<path d="M{LEFT} {BOTTOM - k * v * MIB:.1f}H{RIGHT}" stroke="currentColor" '
                    f'stroke-opacity=".14"/><text x="{LEFT - 5}" y="{BOTTOM - k * v * MIB + 4:.1f}" class="tick">{v:,}'
                    '</text>' for v in levels)
    a, b = across(walk, walk.blind[0]), across(walk, walk.blind[1])
    spot = f'<rect x="{a:.1f}" y="{TOP - 4}" width="{max(b - a, 3):.1f}" height="{BOTTOM - TOP + 4}" fill="{ALARM}" '
    return lines + f'<text x="{LEFT - 5}" y="10" class="tick">MiB</text>' + spot + 'fill-opacity=".22"/>'


def _marks(walk: Walk, k: float) -> str:
    """Readings as dots, their highest as a line, the peak and the names of the moments."""
    dots = "".join(f'<circle cx="{across(walk, i):.1f}" cy="{BOTTOM - k * walk.totals[i]:.1f}" r="1.8" fill="#fff" '
                   'stroke="#111" stroke-width=".7"/>' for i in walk.readings)
    level, x, y = (BOTTOM - k * walk.highest_reading, across(walk, walk.peak), BOTTOM - k * walk.totals[walk.peak])
    side, anchor = (-1, "end") if x > (LEFT + RIGHT) / 2 else (1, "start")
    names, last = "", -99.0
    for name, i in sorted(walk.moments.items(), key=lambda pair: pair[1]):
        at = across(walk, i)
        if name not in ("peak", "loss") and at - last > 58:
            names += f'<text x="{at:.1f}" y="{BOTTOM + 15}">{name}</text>'
            names += f'<path d="M{at:.1f} {BOTTOM}v5" stroke="currentColor"/>'
            last = at
    most = number(walk.totals[walk.peak] / MIB)
    return (f'<path d="M{LEFT} {level:.1f}H{RIGHT}" stroke="currentColor" stroke-dasharray="2 3" stroke-opacity=".7"/>'
            f'{dots}<text x="{x + side * 5:.1f}" y="{y - 4:.1f}" text-anchor="{anchor}">peak {most}</text>'
            f'<text x="{RIGHT}" y="{level - 4:.1f}" text-anchor="end">highest reading '
            f'{number(walk.highest_reading / MIB)}</text>'
            f'{names}<path d="M{LEFT} {BOTTOM}H{BAR_LEFT + BAR_WIDTH}" stroke="currentColor"/>'
            f'<text x="{BAR_LEFT + BAR_WIDTH / 2}" y="{BOTTOM + 15}" text-anchor="middle">now</text>')
