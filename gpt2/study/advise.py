"""What makes a step fit that does not: the savings, alone and together, in the order of their price, each predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

from gpt2.memory import gpus
from gpt2.memory.answer import answer
from gpt2.study.experiments import EXPANDABLE, Experiment, predict

MOST_TOGETHER, MOST_TRIALS = 3, 24
_HUGE_BYTES = 2**44  # a card on which everything fits, to see how much it would take
_HOPE = 1.1  # sets whose estimate is above the capacity by more than a tenth are not tried


@dataclass(frozen=True, eq=False)
class Change:
    """One way of getting memory back: what to type, what it costs, and how that weighs beside the others."""

    option: str
    price: str
    weight: float
    recipe: dict = field(default_factory=dict)
    alloc_conf: str = ""

    def __call__(self, experiment: Experiment) -> Experiment:
        """The experiment with the change; ValueError if they do not go together."""
        conf = ",".join(filter(None, (experiment.alloc_conf, self.alloc_conf)))
        return replace(experiment, recipe=replace(experiment.recipe, **self.recipe), alloc_conf=conf)


CHANGES = (
    Change(f"--alloc-conf {EXPANDABLE}", "no time; a variable of the environment", 1.0, alloc_conf=EXPANDABLE),
    Change("--drop-logits", "no time; one line", 1.1, {"keep_logits": False}),
    Change("--optimizer fused", "no time; the update is quicker", 1.2, {"optimizer": "fused"}),
    Change("--attention sdpa", "no time; attention is quicker", 1.3, {"attention": "sdpa"}),
    Change("--loss chunked", "a little time at the loss", 2, {"loss": "chunked"}),
    Change("--precision bf16", "no time; products are rounded to 16 bit", 3, {"precision": "bf16"}),
    Change("--checkpoint block", "a second forward: about a third more time", 6, {"checkpoint": "block"}),
)


def advise(experiment: Experiment, gpu: gpus.Gpu, torch_release: str | None = None, *, wanted: int = 4,
           tell: Callable[[str], None] = lambda line: None) -> list[dict]:
    """The cheapest changes that make the experiment fit, cheapest first: changes, price, fits and peaks of each.

    Everything at once is predicted first: if that does not fit, it is the answer, with `fits` false. Then single
    changes and sets of up to three, in the order of their price. A set is left out if a part of it fits already, or if
    what its parts save alone gives no hope. Trials have two steps: a third one peaks like the second. `tell` gets a
    line for each.
    """
    experiment = replace(experiment, steps=min(experiment.steps, 2), lengths=experiment.lengths[:2])
    trial = _Trial(gpu, torch_release, min(gpu.free_bytes_at_start, experiment.limit_bytes or math.inf), tell)
    changes = sorted(_applicable(experiment), key=lambda change: change.weight)
    everything = trial(experiment, _everything(changes))
    if not everything["fits"]:
        return [_as_json(everything)]
    before = trial(experiment, ())["peak_reserved_bytes"]
    share: dict[Change, float] = {}
    found: list[dict] = []
    for chosen in _sets(changes):
        if len(found) >= wanted or trial.count >= MOST_TRIALS:
            break
        hope = len(chosen) == 1 or before * math.prod(share[change] for change in chosen) <= trial.capacity * _HOPE
        if hope and not any(set(row["set"]) <= set(chosen) for row in found):
            row = trial(experiment, chosen)
            found += [row] if row["fits"] else []
            if len(chosen) == 1:
                share[chosen[0]] = row["peak_reserved_bytes"] / before
    return [_as_json(row) for row in found or [everything]]


class _Trial:
    """Predicts an experiment with changes. How much it would take shows on a card of any size; only where that is
    more than the real one has, but no more is allocated, the real one may still manage, and is tried."""

    def __init__(self, gpu: gpus.Gpu, release: str | None, capacity: float, tell: Callable[[str], None]):
        self.gpu, self.release, self.capacity, self.tell = gpu, release, capacity, tell
        self.huge, self.count = gpus.with_memory(gpu, _HUGE_BYTES), 0

    def __call__(self, experiment: Experiment, chosen: tuple[Change, ...]) -> dict:
        for change in chosen:
            experiment = change(experiment)
        self.count += 1
        found = self._on(replace(experiment, limit_mib=None), self.huge)
        fits = found["peak_reserved_bytes"] <= self.capacity
        if not fits and found["peak_allocated_bytes"] <= self.capacity:
            tight = self._on(experiment, self.gpu)
            fits, found = tight["fits"], tight if tight["fits"] else found
        row = {"set": chosen, "fits": fits, "peak_allocated_bytes": found["peak_allocated_bytes"],
               "peak_reserved_bytes": found["peak_reserved_bytes"]}
        self.tell(f"{'fits' if fits else 'does not fit'}: {_options(chosen) or 'as it is'}")
        return row

    def _on(self, experiment: Experiment, gpu: gpus.Gpu) -> dict:
        return answer(predict(experiment, gpu, torch_release=self.release), owners=False)


def _applicable(experiment: Experiment) -> Iterator[Change]:
    """The changes that would change something and are allowed."""
    for change in (*CHANGES, *_passes(experiment.recipe.batch, experiment.recipe.accumulate)):
        if change.alloc_conf and "expandable_segments" in experiment.alloc_conf:
            continue
        try:
            if change(experiment) != experiment:
                yield change
        except ValueError:
            pass  # the recipe has something that does not go with it


def _passes(batch: int, accumulate: int) -> Iterator[Change]:
    """The same step in more passes of smaller batches: the three largest batches that divide it."""
    for k in [k for k in range(2, batch + 1) if batch % k == 0][:3]:
        yield Change(f"--batch {batch // k} --accumulate {accumulate * k}",
                     f"the same gradients in {k} passes: smaller products, a little slower", 4 + math.log2(k),
                     {"batch": batch // k, "accumulate": accumulate * k})


def _sets(changes: list[Change]) -> list[tuple[Change, ...]]:
    """One to three changes, cheapest first; the batch is changed once at most."""
    sets = [chosen for n in range(1, MOST_TOGETHER + 1) for chosen in combinations(changes, n)
            if sum("batch" in change.recipe for change in chosen) <= 1]
    return sorted(sets, key=lambda chosen: sum(change.weight for change in chosen))


def _everything(changes: list[Change]) -> tuple[Change, ...]:
    """All changes, with the smallest batch."""
    passes = [change for change in changes if "batch" in change.recipe]
    return tuple(change for change in changes if change not in passes[:-1])


def _options(chosen: tuple[Change, ...]) -> str:
    return " ".join(change.option for change in chosen)


def _as_json(row: dict) -> dict:
    return {"changes": _options(row["set"]), "price": "; ".join(dict.fromkeys(change.price for change in row["set"])),
            **{key: row[key] for key in ("fits", "peak_allocated_bytes", "peak_reserved_bytes")}}
