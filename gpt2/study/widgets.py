"""What readers touch in a notebook: the walk through a step, the calculator, the guesses.

Each widget carries a picture and a text in the same bundle, for pages without a kernel. The slider's value is the
only state; what it shows is a pure function of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as ui

from gpt2.memory.ledger import Ledger
from gpt2.memory.trace import Mark, Trace
from gpt2.study.figures.drawing import conditions
from gpt2.study.figures.step import step_by_owner
from gpt2.study.interactive import svg
from gpt2.study.interactive.calculator_widget import CalculatorWidget, calculator
from gpt2.study.interactive.guesses import GuessWidget, guesses, score
from gpt2.study.interactive.still import Calm, Still, style_sheet
from gpt2.study.interactive.walk import walk_of

__all__ = ["CalculatorWidget", "GuessWidget", "WalkWidget", "calculator", "guesses", "score", "walk"]

LEVELS = ("readings", "every event")


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
        about = ui.HTML(f"<small>{conditions(trace, recipe)} · arrow keys move the slider</small>")
        still = step_by_owner(trace, Ledger(trace).timeline([step]), step=step, subtitle=data.about)
        rows = [ui.HBox([self.play, self.slider]), ui.HBox([*self.buttons.values(), self.level], layout=_wrapping())]
        super().__init__([style_sheet(), self.screen, *rows, about], still, layout=ui.Layout(max_width="920px"))

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
