"""The reader's four guesses: written down before the first measurement, kept, and scored at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ipywidgets as ui
import pandas as pd

from gpt2.study import paths
from gpt2.study.interactive.still import Still, style_sheet
from gpt2.study.interactive.stills import guess_still

QUESTIONS = {  # name: (question, unit, the published author's own guess)
    "optimizer": ("How much does Adam keep?", "MiB", 95),
    "batch": ("The largest batch that fits 45,440 MiB?", "sequences", None),
    "peak": ("When does memory peak?", ("forward", "loss", "backward", "optimizer"), "backward"),
    "largest": ("The largest single tensor?",
                ("token embedding", "attention probabilities", "MLP hidden", "logits"), "token embedding"),
}
TRUTH = {"optimizer": 949.4, "batch": 20, "peak": "backward", "largest": "logits"}  # published, A40
_kept: dict = {}


def place() -> Path:
    """The ignored file that keeps the guesses of this checkout, or of `STUDY_OUT`."""
    return paths.out() / "build" / "guesses.json"


def keep(name: str, value) -> None:
    """Remember one guess, here and in the file. KeyError for a question that was not asked."""
    if name not in QUESTIONS:
        raise KeyError(f"no question {name!r}; the questions: {', '.join(QUESTIONS)}")
    _kept.update(kept() | {name: value})
    paths.write(place(), (json.dumps(_kept, indent=1) + "\n").encode())


def kept() -> dict:
    """The guesses so far; a file that cannot be read counts as none."""
    try:
        found = json.loads(place().read_text(encoding="utf-8"))
        return {name: found[name] for name in QUESTIONS if name in found}
    except (OSError, ValueError, TypeError):
        return {}


def score(guesses: Mapping | None = None, truth: Mapping = TRUTH) -> pd.DataFrame:
    """Each question with the guess, the truth and how far off: a ratio for numbers, right or wrong for words.

    `guesses` default to those kept; a question without a guess stays open.
    """
    guesses = kept() if guesses is None else guesses
    rows = []
    for name, (question, unit, _) in QUESTIONS.items():
        guess, true = guesses.get(name), truth[name]
        rows.append({"question": question, "unit": unit if isinstance(unit, str) else "", "guess": guess, "truth": true,
                     "verdict": _verdict(guess, true)})
    return pd.DataFrame(rows)


class GuessWidget(Still):
    """Four fields; what is written in them is kept at once. `fields` by name."""

    def __init__(self):
        self.fields = {name: _field(name) for name in QUESTIONS}
        for name, field in self.fields.items():
            field.observe(lambda change, name=name: keep(name, change["new"]), "value")
        super().__init__([style_sheet(), *self.fields.values()], guess_still(QUESTIONS))


def guesses() -> GuessWidget:
    """Write your guesses before you look. They are kept in build/guesses.json, which is yours and not committed."""
    return GuessWidget()


def _field(name: str) -> ui.Widget:
    question, unit, _ = QUESTIONS[name]
    options = {"description": question, "style": {"description_width": "340px"}, "layout": ui.Layout(width="560px")}
    if isinstance(unit, tuple):
        value = kept().get(name)
        return ui.Dropdown(options=["", *unit], value=value if value in unit else "", **options)
    options["description"] += f" ({unit})"
    value = kept().get(name, 0)
    return ui.BoundedFloatText(min=0, max=1e9, value=value if isinstance(value, int | float) else 0, **options)


def _verdict(guess, true) -> str:
    if guess in (None, "", 0):
        return "no guess"
    if isinstance(true, str):
        return "right" if guess == true else "wrong"
    if isinstance(guess, str):
        return "not a number"
    ratio = guess / true
    if 0.95 <= ratio <= 1.05:
        return "right"
    return f"{1 / ratio:.1f} times too low" if ratio < 1 else f"{ratio:.1f} times too high"
