"""What makes a step fit that does not: the savings, alone and together, in the order of their price, each predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import combinations

from gpt2.memory import gpus
from gpt2.memory.answer import answer
from gpt2.step import Recipe
from gpt2.study.experiments import Experiment, predict
from gpt2.study.fit import enough_steps
from gpt2.study.savings import prices
from gpt2.study.savings.prices import Change
from gpt2.study.sized import SizedRecipe

MOST_TOGETHER = 3
MOST_WORK = 1_500  # layers simulated, once for each step and micro-batch, a good hundred a second; half, with a find
_NO_LAYER = 4  # what else a step has, in layers
FEW_STEPS = 2  # of a run whose segments have a fixed size: a third step peaks like the second
_HUGE_BYTES = 2**44  # a card on which everything fits, to see how much it would take
_HOPE = 1.3  # sets whose parts, each alone, promise more than this times the capacity are not tried together
_NEAR = 1.01  # estimates are too high by up to a percent, where the allocator gives more than was asked for
_CLEAR = 0.9  # a set that allocates less than this of the capacity will do, though more is reserved than allocated
_LAYERS = (2, 4)  # of the two small models from which a large one's peak is estimated

Set = tuple[Change, ...]


def advise(experiment: Experiment, gpu: gpus.Gpu, torch_release: str | None = None, *, wanted: int = 3,
           tell: Callable[[str], None] = lambda line: None) -> list[dict]:
    """The cheapest changes that make the experiment fit, cheapest first: changes, price, fits and peaks of each.

    If everything at once does not fit, that is the answer, with `fits` false. Else single changes and sets of up to
    three, in the order of their price, until enough are found or MOST_WORK is done; if none of them is enough,
    everything less what is not needed. A set is tried if what it allocates may fit, by an estimate, and nothing of the
    kind fits already for less. What is answered was predicted on the card, for as many steps as `fit` asks for. `tell`
    gets a line for each such prediction.
    """
    trial = _Trial(experiment, gpu, torch_release, tell)
    tell("what each change saves, alone and with others: estimated, then predicted where it is promising")
    changes = list(_applicable(experiment, gpu))
    everything = _everything(experiment, [change for change in changes if "batch" not in change.recipe])
    if trial.promises(everything) > trial.capacity * _CLEAR:
        everything = min(everything, _everything(experiment, changes), key=trial.promises)
    if trial.promises(everything) > trial.capacity * _NEAR:
        return [_as_json(trial.on_any_card(everything))]
    found: list[dict] = []
    for chosen in _sets(experiment, sorted(changes, key=lambda change: change.weight)):
        if len(found) >= wanted or trial.work >= MOST_WORK / (2 if found else 1):
            break
        if not any(_kinds(row["set"]) <= _kinds(chosen) for row in found) and trial.is_hopeful(chosen):
            found += filter(None, [trial(chosen)])
    if not found:
        found = [_trimmed(trial, everything) or trial.on_any_card(everything)]
    return [_as_json(row) for row in found]


class _Trial:
    """Predicts an experiment with changes on a card, and estimates it where a prediction would take long."""

    def __init__(self, experiment: Experiment, gpu: gpus.Gpu, release: str | None, tell: Callable[[str], None]):
        self.experiment, self.gpu, self.release, self.tell = experiment, gpu, release, tell
        self.capacity = min(gpu.free_bytes_at_start, experiment.limit_bytes or math.inf)
        self.huge = gpus.with_memory(gpu, _HUGE_BYTES)
        self.work = 0
        self.estimates: dict[Set, float] = {}

    def __call__(self, chosen: Set) -> dict | None:
        """The run on the card; None if it does not fit."""
        found = self._on(self._long_enough(_apply(self.experiment, chosen)), self.gpu)
        self.tell(f"{'fits' if found['fits'] else 'does not fit'}: {_options(chosen)}")
        return _row(chosen, found) if found["fits"] else None

    def on_any_card(self, chosen: Set) -> dict:
        """What would be taken if the card were large enough."""
        found = self._on(replace(self._few(_apply(self.experiment, chosen)), limit_mib=None), self.huge)
        return _row(chosen, found) | {"fits": False}

    def is_hopeful(self, chosen: Set) -> bool:
        """False if what it allocates does not fit. Sets are first judged by their parts, which is quicker."""
        if len(chosen) > 1:
            before = self.promises(())
            share = math.prod(self.promises((change,)) / before for change in chosen)
            if before * share > self.capacity * _HOPE:
                return False
        return self.promises(chosen) <= self.capacity * _NEAR

    def promises(self, chosen: Set) -> float:
        """Bytes allocated at the peak, estimated: exact for small models, else too low, or too high by a hair.

        The peak is the highest of several moments, each of which grows with the layers in a straight line: the line
        through two small models runs below it.
        """
        if chosen not in self.estimates:
            experiment = self._few(_apply(self.experiment, chosen))
            recipe = replace(experiment.recipe, accumulate=min(experiment.recipe.accumulate, 2))
            few, more = _LAYERS
            if recipe.size.layers <= few + more:
                self.estimates[chosen] = self._peak(replace(experiment, recipe=recipe))
            else:
                low, high = (self._peak(replace(experiment, recipe=_with_layers(recipe, n))) for n in _LAYERS)
                self.estimates[chosen] = high + (high - low) / (more - few) * (recipe.size.layers - more)
        return self.estimates[chosen]

    def _peak(self, experiment: Experiment) -> int:
        return self._on(replace(experiment, limit_mib=None), self.huge)["peak_allocated_bytes"]

    def _few(self, experiment: Experiment) -> Experiment:
        return replace(experiment, steps=FEW_STEPS, lengths=experiment.lengths[:FEW_STEPS])

    def _long_enough(self, experiment: Experiment) -> Experiment:
        few = self._few(experiment)
        enough = enough_steps(few, self.release)
        return few if enough <= FEW_STEPS else replace(experiment, steps=enough_steps(experiment, self.release))

    def _on(self, experiment: Experiment, gpu: gpus.Gpu) -> dict:
        found = answer(predict(experiment, gpu, torch_release=self.release), owners=False)
        self.work += (experiment.recipe.size.layers + _NO_LAYER) * experiment.recipe.accumulate * len(found["per_step"])
        return found


def _with_layers(recipe: Recipe, layers: int) -> SizedRecipe:
    kept = {f.name: getattr(recipe, f.name) for f in fields(Recipe)}
    return SizedRecipe(**kept, custom=replace(recipe.size, layers=layers))


def _applicable(experiment: Experiment, gpu: gpus.Gpu) -> Iterator[Change]:
    """The changes that would change something for the better and are allowed."""
    recipe = experiment.recipe
    for change in prices.changes(recipe, gpu):
        pointless = (
            change.alloc_conf and "expandable_segments" in experiment.alloc_conf,
            "checkpoint" in change.recipe and recipe.checkpoint == "block",
            "precision" in change.recipe and recipe.precision != "fp32",
            "keep_logits" in change.recipe and recipe.loss == "chunked",
            "loss" in change.recipe and recipe.loss == "chunked"
            and change.recipe.get("loss_chunks", 0) <= recipe.loss_chunks,
            change.recipe.get("loss_chunks", 0) > recipe.tokens,
        )
        if not any(pointless) and _together(experiment, (change,)) and change(experiment) != experiment:
            yield change


def _together(experiment: Experiment, chosen: Set) -> bool:
    """Whether they go together: nothing is changed twice, or for nothing, and there is such a recipe."""
    changed = [name for change in chosen for name in change.recipe]
    if len(set(changed)) < len(changed) or {"keep_logits", "loss"} <= set(changed):
        return False
    try:
        _apply(experiment, chosen)
    except ValueError:
        return False
    return True


def _kinds(chosen: Set) -> set[str]:
    """What is changed, whatever to."""
    return {next(iter(change.recipe), "alloc_conf") for change in chosen}


def _apply(experiment: Experiment, chosen: Set) -> Experiment:
    for change in chosen:
        experiment = change(experiment)
    return experiment


def _sets(experiment: Experiment, changes: Sequence[Change]) -> list[Set]:
    """One to three changes that go together, cheapest first."""
    sets = [chosen for n in range(1, MOST_TOGETHER + 1) for chosen in combinations(changes, n)
            if _together(experiment, chosen)]
    return sorted(sets, key=lambda chosen: sum(change.weight for change in chosen))


def _everything(experiment: Experiment, changes: Sequence[Change]) -> Set:
    """As many changes as go together; of those that do not, the last."""
    chosen: Set = ()
    for change in reversed(changes):
        if _together(experiment, (*chosen, change)):
            chosen = (*chosen, change)
    return chosen[::-1]


def _trimmed(trial: _Trial, everything: Set) -> dict | None:
    """Everything less what is clearly not needed, dearest first; None if not even everything fits."""
    needed = everything
    for change in sorted(everything, key=lambda change: -change.weight):
        less = tuple(kept for kept in needed if kept is not change)
        if trial.promises(less) <= trial.capacity * _CLEAR:
            needed = less
    return trial(needed) or (trial(everything) if needed != everything else None)


def _row(chosen: Set, found: dict) -> dict:
    return {"set": chosen, **{key: found[key] for key in ("fits", "peak_allocated_bytes", "peak_reserved_bytes")}}


def _options(chosen: Set) -> str:
    return " ".join(change.option for change in chosen)


def _as_json(row: dict) -> dict:
    return {"changes": _options(row["set"]), "price": prices.of(row["set"]),
            **{key: row[key] for key in ("fits", "peak_allocated_bytes", "peak_reserved_bytes")}}
