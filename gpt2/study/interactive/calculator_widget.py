"""The calculator in a notebook: knobs, an answer by formula while one drags, and the exact one when one lets go."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as ui
from matplotlib.figure import Figure

from gpt2.memory import gpus
from gpt2.model import SIZES
from gpt2.study.interactive.calculator import KNOBS, SHAPE, STEPS, TORCH, Answer, bar, by_formula, by_simulation, words
from gpt2.study.interactive.closed_form import Setting
from gpt2.study.interactive.still import Calm, Still, style_sheet
from gpt2.study.interactive.stills import calculator_still

CUSTOM = "custom"


class CalculatorWidget(Still):
    """Knobs and a screen: `knobs` by name, `answer` and `exact` are what it shows, `redraws` how often it changed."""

    def __init__(self, setting: Setting, gpu: str, exactly: Callable[[Setting, str], Answer], quiet_s: float):
        self.exactly, self.redraws = exactly, 0
        self.answer: Answer = by_formula(setting, gpu)
        self.exact: Answer | None = None
        self.knobs = _knobs(setting, gpu)
        self.screen = ui.HTML(layout=ui.Layout(width="100%", min_height="270px"))
        self.estimate, self.settle = Calm(self._estimate), Calm(self._settle, quiet_s, lead=False)
        for name, knob in self.knobs.items():
            knob.observe(self._model_changed if name == "model" else self._changed, "value")
        self._model_changed(None)
        self._settle()
        rows = [ui.HBox([self.knobs[name] for name in names], layout=ui.Layout(flex_flow="row wrap")) for names in (
            ("model", "gpu", "batch", "length"), KNOBS, SHAPE)]
        super().__init__([style_sheet(), *rows, self.screen], self._still(), layout=ui.Layout(max_width="920px"))

    @property
    def setting(self) -> Setting:
        """What the knobs say. ValueError if no such model can be built."""
        values = {name: knob.value for name, knob in self.knobs.items() if name not in ("model", "gpu")}
        if values["width"] % values["heads"]:
            raise ValueError(f"width {values['width']} is not divisible by {values['heads']} heads")
        return Setting(**values)

    @property
    def gpu(self) -> str:
        return self.knobs["gpu"].value

    def _model_changed(self, _) -> None:
        """A named model sets its shape; a custom one opens the fields."""
        known = SIZES.get(self.knobs["model"].value)
        for name in SHAPE:
            self.knobs[name].disabled = known is not None
            if known is not None:
                self.knobs[name].value = getattr(known, name)
        self.knobs["length"].max = self.knobs["context"].value
        self._changed(None)

    def _changed(self, _) -> None:
        self.knobs["length"].max = self.knobs["context"].value
        self.estimate()
        self.settle()

    def _estimate(self) -> None:
        try:
            self.answer, self.exact = by_formula(self.setting, self.gpu), None
        except ValueError as error:
            self._show(f'<div class="walk calculator"><p>{error}</p></div>')
            return
        self._draw()

    def _settle(self) -> None:
        try:
            self.exact = self.exactly(self.setting, self.gpu)
        except (ValueError, MemoryError) as error:
            self._show(f'<div class="walk calculator"><p>{error}</p></div>')
            return
        self._draw()

    def _draw(self) -> None:
        release = TORCH.get(self.gpu, "as installed")
        about = f"<small>exact: {STEPS} steps on a simulated {self.gpu}, torch {release}</small>"
        picture = bar(self.answer, self.exact) + words(self.answer, self.exact)
        self._show(f'<div class="walk calculator">{picture}{about}</div>')

    def _show(self, html: str) -> None:
        self.screen.value = html
        self.redraws += 1

    def _still(self) -> Figure:
        return calculator_still(self.setting, self.gpu, self.answer, self.exact)


def calculator(setting: Setting | None = None, gpu: str = "A40", *,
               exactly: Callable[[Setting, str], Answer] = by_simulation, quiet_s: float = 0.4) -> CalculatorWidget:
    """Turn the knobs: peak memory by owner, reserved, the card, the largest batch, what fails.

    `exactly` answers once the knobs have been still for `quiet_s` seconds; by default it simulates the step.
    """
    return CalculatorWidget(setting or Setting(), gpu, exactly, quiet_s)


def _knobs(setting: Setting, gpu: str) -> dict[str, ui.Widget]:
    shape = {name: getattr(setting, name) for name in SHAPE}
    named = next((name for name, size in SIZES.items() if {n: getattr(size, n) for n in SHAPE} == shape), CUSTOM)
    narrow, style = ui.Layout(width="162px"), {"description_width": "74px"}
    slider = {"layout": ui.Layout(width="244px"), "style": {"description_width": "48px"}}
    knobs: dict[str, ui.Widget] = {
        "model": ui.Dropdown(options=[*SIZES, CUSTOM], value=named, description="model", layout=narrow, style=style),
        "gpu": ui.Dropdown(options=gpus.names(), value=gpu, description="GPU", layout=narrow, style=style),
        "batch": ui.IntSlider(min=1, max=max(64, setting.batch), value=setting.batch, description="batch", **slider),
        "length": ui.IntSlider(min=1, max=setting.context, value=setting.length, description="length", **slider)}
    for name, options in KNOBS.items():
        knobs[name] = ui.Dropdown(options=options, value=getattr(setting, name), description=name, layout=narrow,
                                  style=style)
    most = {"layers": 200, "width": 32_768, "heads": 256, "vocabulary": 1_000_000, "context": 131_072}
    for name in SHAPE:
        knobs[name] = ui.BoundedIntText(min=1, max=most[name], value=shape[name], description=name, layout=narrow,
                                        style=style)
    return knobs
