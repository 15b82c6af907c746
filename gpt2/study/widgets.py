"""What readers touch in a notebook: the walk through a step, the calculator, the guesses.

Each widget carries a picture and a text in the same bundle, for pages without a kernel. The slider's value is the
only state; what it shows is a pure function of it.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import ipywidgets as ui
import matplotlib
from matplotlib.figure import Figure

from gpt2.memory.ledger import Ledger
from gpt2.memory.trace import Mark, Trace
from gpt2.study import svg
from gpt2.study.drawing import STYLE, alt, conditions
from gpt2.study.figures_step import step_by_owner
from gpt2.study.walk import walk_of

CSS = Path(__file__).with_name("walk.css")
LEVELS = ("readings", "every event")


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


class WalkWidget(Still):
    """Play, slider and buttons over one step of a trace; `slider.value` is the stop, `data` the walk."""

    def __init__(self, trace: Trace, *, step: int, readings: Sequence[Mark] | None, recipe: str, interval_ms: int):
        self.data = data = walk_of(trace, step=step, readings=readings, recipe=recipe)
        self.ground = svg.mountain(data)
        self.level = ui.ToggleButtons(options=LEVELS, style=ui.ToggleButtonsStyle(button_width="100px"))
        self.stops = data.frames(every=False)
        last, at = len(self.stops) - 1, self.stops.index(data.peak)
        self.play = ui.Play(min=0, max=last, value=at, interval=interval_ms, show_repeat=False)
        self.slider = ui.IntSlider(min=0, max=last, value=at, readout=False, layout=ui.Layout(flex="1 1 auto"))
        ui.jslink((self.play, "value"), (self.slider, "value"))
        self.buttons = {name: self._button(name, index) for name, index in data.moments.items()}
        self.screen = ui.HTML(layout=ui.Layout(width="100%"))
        self.draw = Calm(self._draw)
        self.slider.observe(lambda change: self.draw(), "value")
        self.level.observe(lambda change: self._change_level(), "value")
        self._draw()
        style = ui.HTML(f"<style>{CSS.read_text(encoding='utf-8')}</style>")
        about = ui.HTML(f'<small>{conditions(trace, recipe)} · arrow keys move the slider</small>')
        still = step_by_owner(trace, Ledger(trace).timeline([step]), step=step, subtitle=data.about)
        rows = [ui.HBox([self.play, self.slider]), ui.HBox([*self.buttons.values(), self.level], layout=_wrapping())]
        super().__init__([style, self.screen, *rows, about], still, layout=ui.Layout(max_width="920px"))

    def show(self, index: int) -> None:
        """Go to an event of the step, or to the first stop after it."""
        self.slider.value = next((n for n, stop in enumerate(self.stops) if stop >= index), len(self.stops) - 1)

    def _button(self, name: str, index: int) -> ui.Button:
        button = ui.Button(description=name, tooltip=f"to where {name} is", layout=ui.Layout(width="auto"))
        button.on_click(lambda _: self.show(index))
        return button

    def _change_level(self) -> None:
        here = self.stops[self.slider.value]
        self.stops = self.data.frames(every=self.level.value == LEVELS[1])
        for control in (self.play, self.slider):
            control.max = len(self.stops) - 1
        self.show(here)
        self._draw()

    def _draw(self) -> None:
        index = self.stops[min(self.slider.value, len(self.stops) - 1)]
        self.screen.value = svg.draw(self.data, self.ground, index)


def walk(trace: Trace, *, step: int = 2, readings: Sequence[Mark] | None = None, recipe: str = "",
         interval_ms: int = 120) -> WalkWidget:
    """Walk through a step of a trace: play, drag, use the arrow keys, or jump to a moment.

    `readings` are the marks that hooks made; by default all marks of the step. `recipe` is a line for the caption.
    """
    return WalkWidget(trace, step=step, readings=readings, recipe=recipe, interval_ms=interval_ms)


def _wrapping() -> ui.Layout:
    return ui.Layout(flex_flow="row wrap", align_items="center")
