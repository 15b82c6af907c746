"""The runs a notebook looks at: predicted now, and recorded on a real GPU; each once per process.

A prediction for the notebook's card stands beside the committed recording of the same experiment, where there is one,
and beside the prediction for the card and the PyTorch release of that recording.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from gpt2.memory import gpus
from gpt2.memory.trace import Trace
from gpt2.step import Recipe
from gpt2.study import paths
from gpt2.study.experiments import EXPERIMENTS, Experiment, predict

HOME = "h200"  # the folder of the recordings that came with the study


@dataclass(frozen=True)
class Beside:
    """One experiment, three times; `recorded` and `twin` are None where nobody has recorded it."""

    predicted: Trace  # for the notebook's card
    recorded: Trace | None  # on a real one
    twin: Trace | None  # the prediction for that real one

    def traces(self) -> list[Trace]:
        """Those there are, in the order of the tables."""
        return [trace for trace in (self.predicted, self.recorded, self.twin) if trace is not None]

    @property
    def recipe(self) -> Recipe:
        return Recipe(**self.predicted.meta["recipe"])


def beside(
    experiment: Experiment | Recipe, *, gpu: str, torch_release: str, hooks: bool = False, folder: str = HOME
) -> Beside:
    """Predict an experiment, or a recipe in its usual three steps, and find its recording.

    `hooks` puts readings around every block of step 2 and a stack on every event, in the prediction for `gpu` alone.
    """
    experiment = experiment if isinstance(experiment, Experiment) else of_recipe(experiment)
    found = recorded(experiment.name, folder)
    twin = None if found is None else predicted(experiment, slug(found.meta["gpu"]), release(found))
    return Beside(predicted(replace(experiment, readings=hooks), gpu, torch_release, hooks), found, twin)


@cache
def predicted(experiment: Experiment, gpu: str, torch_release: str | None = None, stacks: bool = False) -> Trace:
    """The prediction of an experiment; the second request for it costs nothing."""
    return predict(experiment, gpu, torch_release=torch_release, stacks=stacks)


@cache
def recorded(name: str, folder: str = HOME) -> Trace | None:
    """The recording of an experiment in results/measured/<folder>/traces, None if there is none."""
    try:
        return Trace.load(paths.find(f"measured/{folder}/traces/{name}.json.gz"))
    except FileNotFoundError:
        return None


def of_recipe(recipe: Recipe) -> Experiment:
    """The experiment that runs just this recipe on the whole card, recorded or not."""
    plain = Experiment("", recipe)
    known = (e for e in EXPERIMENTS.values() if replace(e, name="", tags=()) == plain)
    return next(known, replace(plain, name=recipe.describe()))


def recorded_readings(here: Beside) -> Beside:
    """The same prediction beside the recording with hooks, where `here` is the recipe that has one."""
    if here.recipe != Recipe() or (found := recorded("readings")) is None:
        return Beside(here.predicted, None, None)
    return Beside(here.predicted, found, predicted(EXPERIMENTS["readings"], slug(found.meta["gpu"]), release(found)))


def of_trace(trace: Trace) -> Recipe:
    """The recipe that a trace was made with; options that its day did not know have their defaults."""
    return Recipe(**trace.meta["recipe"])


def slug(gpu: str) -> str:
    """The name of a card as a folder: `NVIDIA H200` is `h200`; of a card without a profile, its device name."""
    try:
        gpu = gpus.find(gpu).name
    except ValueError:
        pass
    return paths.gpu_folder(gpu).lower()


def release(trace: Trace) -> str:
    """The PyTorch release of a trace, without the build."""
    return trace.meta["torch"].partition("+")[0]


def source(trace: Trace) -> str:
    """`predicted A40` or `recorded H200`: the head of a column."""
    verb = "predicted" if trace.meta["kind"] == "predicted" else "recorded"
    return f"{verb} {slug(trace.meta['gpu']).upper().replace('-', ' ')}"
