"""A recipe whose model has no name: any layers, width, heads, vocabulary and context."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2.model import SIZES, Size
from gpt2.step import Recipe
from gpt2.study.interactive.closed_form import Setting


@dataclass(frozen=True)
class SizedRecipe(Recipe):
    """A Recipe that trains a model of `custom` size; `model` is then only a word. ValueError as in Recipe."""

    custom: Size | None = None

    @property
    def size(self) -> Size:
        return self.custom or super().size

    @classmethod
    def of(cls, setting: Setting) -> SizedRecipe:
        """The recipe of the calculator's knobs."""
        size = Size(setting.layers, setting.width, setting.heads, setting.vocabulary, setting.context)
        named = next((name for name, known in SIZES.items() if known == size), "124M")
        same = ("batch", "length", "precision", "attention", "checkpoint", "loss", "optimizer")
        return cls(model=named, custom=size, **{name: getattr(setting, name) for name in same})
