"""The sheet that every figure is drawn on: its finding and conditions on top, axes placed in inches below."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gpt2.memory.trace import Trace
from gpt2.study.palette import MIB, MUTED

STYLE = Path(__file__).parents[1] / "study.mplstyle"
SHORTEST_ALT = 40
_EDGE = 0.16  # inches between the sheet's border and any text


def drawn(function: Callable[..., Figure]) -> Callable[..., Figure]:
    """Run a figure function wholly inside the study's style."""

    @functools.wraps(function)
    def styled(*args, **kwargs) -> Figure:
        with matplotlib.rc_context(fname=STYLE):
            return function(*args, **kwargs)

    return styled


def conditions(trace: Trace | None = None, recipe: str = "", **facts: object) -> str:
    """The subtitle: what was run, where, and whether it is predicted, measured or published.

    `recipe` is `Recipe.describe()` or any text; `facts` (gpu, torch, kind, date, ...) override the trace's own.
    """
    facts = {**(trace.meta if trace is not None else {}), **facts}
    kind, gpu, date = facts.get("kind", ""), facts.get("gpu", ""), facts.get("date", "")
    verb = {"predicted": "predicted for", "measured": "recorded on", "published": "published for"}.get(str(kind), "")
    words = [recipe, f"torch {facts['torch']}" if facts.get("torch") else "", facts.get("allocator_conf") or "",
             f"{verb} {gpu}" if gpu else kind, str(date)[:10] if kind == "measured" else ""]
    return " · ".join(str(word).strip() for word in words if word)


def alt(figure: Figure) -> str:
    """What the figure says, in words, for those who do not see it."""
    return figure.alt_text


class Sheet:
    """A figure whose head holds the finding and its conditions; below it, axes are placed by margins in inches."""

    def __init__(self, title: str, subtitle: str, *, width: float = 8.0, height: float = 4.6, says: str = ""):
        """`height` is that of the part below the head; `says` completes the title to the alt text."""
        self.width, self.below = width, height
        probe = _renderer(Figure(dpi=100))
        heads = _wrap(probe, title, width - 2 * _EDGE, 12, "bold")
        subs = _wrap(probe, subtitle, width - 2 * _EDGE, 8.5, "normal") if subtitle else []
        head = _EDGE + 0.215 * len(heads) + 0.05 + 0.165 * len(subs)
        self.height = height + head
        self.figure = Figure(figsize=(width, self.height))
        self.renderer = _renderer(self.figure)
        self.figure.alt_text = " ".join(f"{title.rstrip('.')}. {says} {subtitle}".split())
        if len(self.figure.alt_text) < SHORTEST_ALT:
            raise ValueError(f"a figure states its finding in at least {SHORTEST_ALT} characters, not {title!r}")
        y = self.height - _EDGE
        for i, line in enumerate(heads):
            self.write(_EDGE, y - 0.215 * i, line, size=12, weight="bold", va="top")
        for i, line in enumerate(subs):
            self.write(_EDGE, y - 0.215 * len(heads) - 0.04 - 0.165 * i, line, color=MUTED, va="top")

    def write(self, x: float, y: float, text: str, **style):
        """Text at inches from the lower left corner of the sheet."""
        return self.figure.text(x / self.width, y / self.height, text, **style)

    def axes(self, left: float, bottom: float, right: float, top: float, **options) -> Axes:
        """Axes with these margins in inches to the sheet's borders and, on top, to the head."""
        box = (left / self.width, bottom / self.height, (self.width - left - right) / self.width,
               (self.below - bottom - top) / self.height)
        return self.figure.add_axes(box, **options)

    def extent(self, text):
        """The box of a text in pixels."""
        return text.get_window_extent(self.renderer)

    def text_inches(self, text: str, size: float = 8.5, weight: str = "normal") -> float:
        """How wide a text will be."""
        return _inches(self.renderer, text, size, weight)


def bytes_axis(axis, label: str = "", unit: int = MIB, ticks: int = 6) -> None:
    """An axis of bytes, from 0, labelled in MiB (or whatever `unit` is)."""
    axis.set_major_locator(_Steps(unit, ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:,.6g}"))
    if label:
        axis.set_label_text(label)


class _Steps(MaxNLocator):
    """Round numbers of the unit that people read, not of bytes."""

    def __init__(self, unit: int, count: int):
        super().__init__(count, steps=[1, 2, 2.5, 4, 5, 10])
        self.unit = unit

    def tick_values(self, vmin, vmax):
        return np.asarray(super().tick_values(vmin / self.unit, vmax / self.unit)) * self.unit


def _renderer(figure: Figure):
    return FigureCanvasAgg(figure).get_renderer()


def _inches(renderer, text: str, size: float, weight: str) -> float:
    width, _, _ = renderer.get_text_width_height_descent(text, FontProperties(size=size, weight=weight), False)
    return width / renderer.dpi


def _wrap(renderer, text: str, inches: float, size: float, weight: str) -> list[str]:
    """`text` in lines no wider than `inches`."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _inches(renderer, longer, size, weight) > inches:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
