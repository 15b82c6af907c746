"""What every widget of the study has: a picture and words for pages without a kernel, and calm in a burst of events."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import ipywidgets as ui
import matplotlib
from matplotlib.figure import Figure

from gpt2.study.figures.drawing import STYLE, alt

_CSS = Path(__file__).with_name("walk.css")


class Still(ui.VBox):
    """A box of widgets with a picture of itself, and words, where no kernel can move it."""

    def __init__(self, children: Sequence[ui.Widget], figure: Figure, **options):
        super().__init__(children, **options)
        self.picture, self.text = png(figure), alt(figure)

    def _repr_mimebundle_(self, **kwargs) -> dict:
        return {**super()._repr_mimebundle_(**kwargs), "image/png": self.picture, "text/plain": self.text}


class Calm:
    """A function whose calls may come in bursts: the first of a burst runs at once, the last when it is over.

    With `lead=False` nothing runs before `quiet_s` without a call. Outside an event loop every call runs at once.
    """

    def __init__(self, function: Callable[..., None], quiet_s: float = 0.03, *, lead: bool = True):
        self.function, self.quiet_s, self.lead = function, quiet_s, lead
        self._timer, self._arguments, self._last = None, (), float("-inf")

    def __call__(self, *arguments) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.function(*arguments)
            return
        self._arguments = arguments
        if self.lead and self._timer is None and loop.time() - self._last > self.quiet_s:
            self._run(loop)
        elif self._timer is None or not self.lead:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(self.quiet_s, self._run, loop)

    def _run(self, loop) -> None:
        self._timer = None
        self.function(*self._arguments)
        self._last = loop.time()


def png(figure: Figure) -> bytes:
    """The bytes of a figure, the same for the same figure."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(fname=STYLE):
        figure.savefig(buffer, format="png", metadata={"Software": None, "Description": alt(figure)})
    return buffer.getvalue()


def style_sheet() -> ui.HTML:
    """The study's style, as a widget."""
    return ui.HTML(f"<style>{_CSS.read_text(encoding='utf-8')}</style>")
