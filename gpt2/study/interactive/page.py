"""The study's widgets as fragments of a page: HTML with its own style and script, no kernel, no network."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import pandas as pd

from gpt2.memory import formulas, gpus
from gpt2.memory.trace import Category, Mark, Trace
from gpt2.model import SIZES
from gpt2.study.interactive import closed_form, svg
from gpt2.study.interactive.calculator import BAR_ROOM, KNOBS, SHAPE, WIDTH, workspace_bytes
from gpt2.study.interactive.closed_form import Setting
from gpt2.study.interactive.walk import SAID, Walk, walk_of
from gpt2.study.palette import ALARM, CACHED, CACHED_EDGE, COLOURS

_HERE = Path(__file__).parent


def walk_html(trace: Trace, *, step: int = 2, readings: Sequence[Mark] | None = None, recipe: str = "") -> str:
    """The walk through a step as a fragment to put into any page: play, slider, keys, buttons, light and dark."""
    return walk_fragment(walk_of(trace, step=step, readings=readings, recipe=recipe))


def walk_fragment(walk: Walk) -> str:
    """The same, of a walk that exists."""
    buttons = "".join(f'<button data-to="{index}">{name}</button>' for name, index in walk.moments.items())
    fields = "".join(f'<{tag} data-is="{name}"></{tag}>' for tag, name in (
        ("b", "total"), ("span", "where"), ("span", "what"), ("span", "who"), ("em", "verdict")))
    body = (
        f'<div class="walk"><div class="picture"><svg viewBox="0 0 {svg.WIDTH} {svg.HEIGHT}" data-is="picture" '
        f'role="img" aria-label="memory during the step, stacked by owner">{svg.mountain(walk)}<g data-is="bar"></g>'
        '<path data-is="cursor" stroke="currentColor" fill="none"/>'
        '<circle data-is="dot" r="3" fill="currentColor"/></svg>'
        f'<svg viewBox="0 0 {svg.WIDTH} {svg.LENS_HEIGHT}" class="lens" data-is="lens"></svg>'
        '<div class="controls"><button data-is="play" aria-label="play">▶</button>'
        '<input type="range" min="0" step="1" value="0" data-is="slider" aria-label="moment of the step"></div></div>'
        f'<div class="beside"><div class="words">{fields}</div>'
        f'<table data-is="owners">{svg.owners(walk, walk.peak)}</table></div></div>'
        f'<div class="controls">{buttons}<label><input type="checkbox" data-is="level"> every event</label></div>'
        f"<small>{escape(walk.about)} · keys: ← → and space</small>")
    return fragment("walk", body, _step(walk))


def calculator_html(table: pd.DataFrame | None = None, setting: Setting | None = None, gpu: str = "A40") -> str:
    """The calculator as a fragment: formulas while one drags, and the exact answers of `table` where it has them.

    `table` is `calculator.grid(...)`: exact predictions, made before the page is. The page opens at `setting`.
    """
    setting = setting or Setting()
    shape = {name: getattr(setting, name) for name in SHAPE}
    model = next((name for name, size in SIZES.items() if {n: getattr(size, n) for n in SHAPE} == shape), "custom")
    row = '<div class="controls">{}</div>'.format
    sliders = "".join(
        f'<label class="wide">{name} <input type="range" data-is="{name}" min="1" max="{most}" value="{value}">'
        f'<output data-is="{name}-is"></output></label>'
        for name, most, value in (("batch", max(128, setting.batch), setting.batch),
                                  ("length", setting.context, setting.length)))
    fields = "".join(f'<label>{name} <input type="number" min="1" value="{shape[name]}" data-is="{name}"></label>'
                     for name in SHAPE)
    body = (
        row(_choice("model", [*SIZES, "custom"], model) + _choice("gpu", gpus.names(), gpu, "GPU")) + row(sliders)
        + row("".join(_choice(name, options, getattr(setting, name)) for name, options in KNOBS.items()))
        + f"<details><summary>layers, width, heads, vocabulary, context</summary>{row(fields)}</details>"
        '<p data-is="note"></p><div class="walk calculator" data-is="screen">'
        f'<div class="card" data-is="card"></div><svg viewBox="-4 0 {WIDTH} 62" data-is="bar" role="img" '
        'aria-label="peak memory by owner beside the card"></svg>'
        '<div class="verdict"><b data-is="verdict"></b> <span data-is="largest"></span></div>'
        "<table><thead><tr><th>MiB at the peak</th><th>formula</th><th>exact</th><th>difference</th></tr></thead>"
        '<tbody data-is="numbers"></tbody></table><p data-is="who"></p><div class="controls" data-is="stops"></div>'
        '<div class="key" data-is="key"></div></div>')
    return fragment("calculator", body, _formulas(table))


def guesses_html(questions: Mapping[str, tuple], truth: Mapping[str, object]) -> str:
    """The four guesses as a form, which the browser keeps; with `truth`, what it is and how far off each guess was."""
    rows = []
    for name, (question, unit, published) in questions.items():
        authors = f" <small>the article's author guessed {published}</small>" if published else ""
        answer = f'<output data-is="{name}-is"></output>{authors}' if truth else ""
        entry = (_choice(name, ["", *unit], "", question) if isinstance(unit, tuple) else
                 f'<label>{question} ({unit}) <input type="number" min="0" step="any" data-is="{name}"></label>')
        rows.append(f"<div>{entry} {answer}</div>")
    note = "kept by this browser; scored in the last notebook" if not truth else "your guesses, and what was published"
    body = f'<div class="guesses">{"".join(rows)}</div><small>{note}</small><p data-is="note"></p>'
    return fragment("guesses", body, {"names": list(questions), "truth": dict(truth)})


def fragment(name: str, body: str, data: dict) -> str:
    """A page's fragment: the style, the body and the script `name`.js, given the fragment and `data`."""
    style = "".join(_read(file) for file in ("walk.css", "page.css"))
    packed = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    script = f"{_read(f'{name}.js').strip()}(document.currentScript.parentElement, {packed});"
    return (f'<section class="study-widget" tabindex="-1"><style>{style}</style>{body}<script>{script}</script>'
            "</section>")


def _choice(name: str, options: Sequence[str], chosen: str, label: str = "") -> str:
    items = "".join(f"<option{' selected' if option == chosen else ''}>{option}</option>" for option in options)
    return f'<label>{label or name} <select data-is="{name}">{items}</select></label>'


def _formulas(table: pd.DataFrame | None) -> dict:
    """The closed form of every choice of knobs as text, and the exact rows."""
    categories, texts, moments = list(Category), {}, {}
    for choice in itertools.product(*KNOBS.values()):
        setting = Setting(**dict(zip(KNOBS, choice, strict=True)))
        moments[",".join(choice)] = {
            name: [(categories.index(owner), size, texts.setdefault(text, len(texts))) for owner, size, text in terms]
            for name, terms in closed_form.moments(setting).items()}
    return {
        "formulas": list(texts), "parameters": closed_form.PARAMETERS, "moments": moments, "knobs": KNOBS,
        "chunks": closed_form.CHUNKS, "ratio": formulas.reserved_estimate(10**12) / 10**12, "room": BAR_ROOM,
        "owners": [category.value for category in categories],
        "colours": [COLOURS[category] for category in categories],
        "cached": CACHED, "edge": CACHED_EDGE, "alarm": ALARM,
        "sizes": {name: [getattr(size, part) for part in SHAPE] for name, size in SIZES.items()},
        "gpus": {name: {"capacity": gpus.find(name).free_bytes_at_start, "workspace": workspace_bytes(name)}
                 for name in gpus.names()},
        "exact": [] if table is None else json.loads(table.fillna("").to_json(orient="records"))}


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _step(walk: Walk) -> dict:
    """What the script needs to know of a step, as few numbers as will do."""
    owner, size, action, by, phase = [], [], [], [], []
    who: dict[str, int] = {}
    phases: dict[str, int] = {}
    said = list(SAID)
    blocks, blocks_over = [], []
    index = {category: j for j, category in enumerate(walk.categories)}
    for i in range(len(walk)):
        event, (birth, category) = walk.event(i), walk.blocks.get(i, (None, None))
        sign = 0 if birth is None else 1 if event.action == "alloc" else -1
        owner.append(-1 if birth is None else index[category])
        blocks.append(sign * birth.requested_bytes if birth else 0)
        blocks_over.append(sign * (birth.block_bytes - birth.requested_bytes) if birth else 0)
        size.append(event.block_bytes)
        action.append(said.index(event.action))
        by.append(who.setdefault(walk.words(i)[2], len(who)))
        phase.append(phases.setdefault(event.phase, len(phases)))
    before = walk.stacks[0].tolist()
    if owner[0] >= 0:
        before[owner[0]] -= blocks[0]
        before[index[Category.SLACK]] -= blocks_over[0]
    return {
        "before": before, "owner": owner, "bytes": blocks, "over": blocks_over, "size": size, "action": action,
        "by": by, "phase": phase, "who": list(who), "phases": list(phases), "said": list(SAID.values()),
        "slack": index[Category.SLACK], "colours": [COLOURS[category] for category in walk.categories],
        "readings": list(walk.readings), "names": list(walk.reading_names), "moments": walk.moments,
        "blind": list(walk.blind),
        "geometry": {"left": svg.LEFT, "right": svg.RIGHT, "top": svg.TOP, "bottom": svg.BOTTOM,
                     "lens": svg.LENS_HEIGHT, "bar_left": svg.BAR_LEFT, "bar_width": svg.BAR_WIDTH,
                     "reach": svg.LENS_REACH}}
