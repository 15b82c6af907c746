"""The calculator: any setting of the knobs, by formula at once and by simulation exactly.

The formulas are `closed_form`; the exact answer is the one of `python -m gpt2 predict`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from html import escape

import pandas as pd

from gpt2.memory import formulas, gpus
from gpt2.memory.trace import Category
from gpt2.study.interactive import closed_form
from gpt2.study.interactive.closed_form import Setting
from gpt2.study.palette import ALARM, CACHED, CACHED_EDGE, COLOURS, MIB, number

KNOBS = {
    "precision": ("fp32", "bf16", "fp16"), "attention": ("explicit", "sdpa"), "checkpoint": ("none", "block"),
    "loss": ("full", "chunked"), "optimizer": ("foreach", "fused", "loop")}
SHAPE = ("layers", "width", "heads", "vocabulary", "context")
TORCH = {"A40": "2.5.1"}  # the release of the published runs; elsewhere the installed one
STEPS = 3
WIDTH, BAR_TOP, BAR_HEIGHT, BAR_ROOM = 700, 11, 40, 692


@dataclass(frozen=True)
class Answer:
    """Bytes at the peak, and whether they fit. `reserved_bytes` of a formula is an estimate."""

    kind: str  # "formula" | "exact"
    owners: dict[Category, int]
    reserved_bytes: int
    capacity_bytes: int
    fits: bool
    moment: str  # what sets the peak
    largest_batch: int | None = None
    failure: str = ""  # the event that fails

    @property
    def allocated_bytes(self) -> int:
        return sum(self.owners.values())


def by_formula(setting: Setting, gpu: str = "A40") -> Answer:
    """At once, no tensors: the peak by closed form, reserved by the published ratio, the largest batch."""
    card = gpus.find(gpu)
    workspace = workspace_bytes(gpu)
    moment, owners = closed_form.peak(setting, workspace)
    reserved = formulas.reserved_estimate(sum(owners.values()))
    capacity = card.free_bytes_at_start
    return Answer("formula", owners, reserved, capacity, reserved <= capacity, moment,
                  closed_form.largest_batch(setting, capacity, workspace))


@lru_cache(maxsize=128)
def by_simulation(setting: Setting, gpu: str = "A40") -> Answer:
    """Exactly, in a second or two: what `predict` says of three steps. Kept, so that a setting is simulated once."""
    from gpt2.memory.answer import answer
    from gpt2.study.experiments import Experiment, predict
    from gpt2.study.sized import SizedRecipe

    recipe = SizedRecipe.of(setting)
    found = answer(predict(Experiment("calculator", recipe, steps=STEPS), gpu, torch_release=TORCH.get(gpu)))
    owners = {Category(row["category"]): row["bytes"] for row in found["ledger"]}
    top, failed = found["peak"], found["out_of_memory"]
    return Answer("exact", owners, found["peak_reserved_bytes"], gpus.find(gpu).free_bytes_at_start, found["fits"],
                  _named(top), failure=_named(failed) if failed else "")


def workspace_bytes(gpu: str) -> int:
    """cuBLAS's workspace of one thread on this card."""
    return 33_554_432 if gpus.find(gpu).capability == (9, 0) else formulas.CUBLAS_WORKSPACE_BYTES


def grid(settings: Iterable[tuple[Setting, str]]) -> pd.DataFrame:
    """Exact answers of many (setting, gpu), a row each: what the exported page looks its answers up in."""
    rows = []
    for setting, gpu in settings:
        found = by_simulation(setting, gpu)
        rows.append({"gpu": gpu, **asdict(setting), "peak_allocated_bytes": found.allocated_bytes,
                     "peak_reserved_bytes": found.reserved_bytes, "fits": found.fits, "moment": found.moment,
                     "failure": found.failure})
    return pd.DataFrame(rows, columns=["gpu", *(field.name for field in fields(Setting)), "peak_allocated_bytes",
                                       "peak_reserved_bytes", "fits", "moment", "failure"])


def bar(answer: Answer, exact: Answer | None = None) -> str:
    """Allocated by owner, reserved as a pale bar with an edge, the exact peak as a tick, the card as a line: SVG."""
    exact = exact if exact and exact.fits else None  # a run that failed has no peak to show
    reserved = max(answer.reserved_bytes, exact.reserved_bytes if exact else 0, answer.allocated_bytes)
    k = BAR_ROOM / max(answer.capacity_bytes, reserved) / 1.03
    x, parts = 0.0, []
    for category, size in answer.owners.items():
        parts.append(f'<rect x="{x:.1f}" y="{BAR_TOP}" width="{k * size:.2f}" height="{BAR_HEIGHT}" '
                     f'fill="{COLOURS[category]}"/>')
        x += k * size
    card, pool = k * answer.capacity_bytes, k * (exact or answer).reserved_bytes
    tick = "" if exact is None else (f'<path d="M{k * exact.allocated_bytes:.1f} {BAR_TOP - 5}v{BAR_HEIGHT + 10}" '
                                     'stroke="currentColor" stroke-width="2"/>')
    return (f'<div class="card">free on the card: {number(answer.capacity_bytes / MIB, 0)} MiB</div>'
            f'<svg viewBox="-4 0 {WIDTH} 62" role="img" aria-label="peak memory by owner beside the card">'
            f'<rect x="0" y="{BAR_TOP}" width="{pool:.1f}" height="{BAR_HEIGHT}" fill="{CACHED}" '
            f'stroke="{CACHED_EDGE}"/>{"".join(parts)}{tick}'
            f'<path d="M{card:.1f} {BAR_TOP - 10}v{BAR_HEIGHT + 20}" stroke="{ALARM}" stroke-width="3"/></svg>')


def words(answer: Answer, exact: Answer | None) -> str:
    """The same in words, as HTML: by formula, exactly, and the difference."""
    best = exact or answer
    verdict = "fits" if best.fits else "does not fit"
    head = f'<b class="{"good" if best.fits else "bad"}">{verdict}</b> <span>largest batch by formula: '
    head += f"{number(answer.largest_batch or 0, 0)}</span>"
    rows = [("allocated", answer.allocated_bytes, exact and exact.allocated_bytes),
            ("reserved", answer.reserved_bytes, exact and exact.reserved_bytes)]
    body = "".join(f"<tr><td>{name}</td><td>{number(a / MIB)}</td>{_beside(a, b, best.fits)}</tr>"
                   for name, a, b in rows)
    table = f"<table><tr><th>MiB at the peak</th><th>formula</th><th>exact</th><th>difference</th></tr>{body}</table>"
    who = "" if exact is None else f"fails: {exact.failure}" if exact.failure else f"peak set by: {exact.moment}"
    return (f'<div class="verdict">{head}</div>{table}<p>{escape(who or f"peak: {answer.moment}")}</p>'
            f'<div class="key">{_key(best)}</div>')


def _beside(formula: int, exact: int | None, fits: bool) -> str:
    """The cells of the exact number and of the difference; a run that failed has only what it had reached."""
    if exact is None:
        return "<td>…</td><td>…</td>"
    if not fits:
        return f"<td>{number(exact / MIB)} so far</td><td></td>"
    return f"<td>{number(exact / MIB)}</td><td>{number((formula - exact) / MIB, sign=True)}</td>"


def _key(answer: Answer) -> str:
    return "".join(f'<span><i style="background:{COLOURS[category]}"></i>{category.value} '
                   f"{number(size / MIB, 0)}</span>"
                   for category, size in answer.owners.items() if size >= MIB / 2)


def _named(request: dict) -> str:
    """`step 2, backward, GPT2, _log_softmax_backward_data: 1,570.5 MiB`."""
    where = ", ".join(word for word in (f"step {request['step']}", request["phase"], request["module"],
                                        request["operator"].removeprefix("aten.")) if word)
    return f"{where}: {number(request['requested_bytes'] / MIB)} MiB"
