"""How large a batch, or how long a sequence, fits on a card that need not be here."""

from __future__ import annotations

from dataclasses import replace

from gpt2.memory import gpus
from gpt2.memory.answer import answer, request
from gpt2.memory.caching.settings import Settings
from gpt2.memory.fit import STEPS, Search, Trial, search
from gpt2.study.experiments import Experiment, predict

WHAT = ("batch", "length")
MOST_TOKENS = 2**26  # of a step that is tried: their ids take 512 MiB of this machine's memory
SEARCH_STEPS = 3  # of a trial on the way to the boundary


def enough_steps(experiment: Experiment, torch_release: str | None = None) -> int:
    """Steps that the experiment must survive to be called to fit: its own, and STEPS at least with expandable segments.

    Raises ValueError if its allocator settings cannot be read. See `gpt2.memory.fit`.
    """
    if experiment.lengths:  # one for each step
        return len(experiment.lengths)
    settings = Settings.parse(experiment.alloc_conf, *([torch_release] if torch_release else []))
    return max(experiment.steps, STEPS) if settings.expandable_segments else experiment.steps


def largest(experiment: Experiment, gpu: gpus.Gpu, what: str = "batch", torch_release: str | None = None,
            steps: int | None = None) -> Search:
    """The largest batch or length with which the experiment fits on the card; the search begins at the recipe's.

    `steps` is how many of them a run must survive, by default `enough_steps`. Trials on the way to the boundary have
    fewer; what is answered was tried for all of them.
    """
    recipe, steps = experiment.recipe, steps or enough_steps(experiment, torch_release)

    def run(number: int, steps: int) -> Trial:
        trace = predict(replace(with_(experiment, **{what: number}), steps=steps), gpu, torch_release=torch_release)
        found = answer(trace, owners=False)
        return Trial(number, found["fits"], found["peak_allocated_bytes"], found["peak_reserved_bytes"],
                     trace.marks[-1].allocated_bytes if trace.marks else 0, found["out_of_memory"], steps)

    capacity = min(gpu.free_bytes_at_start, experiment.limit_bytes or gpu.free_bytes_at_start)
    most = recipe.size.context if what == "length" else max(MOST_TOKENS // recipe.length, recipe.batch)
    few = min(steps, SEARCH_STEPS)
    return search(lambda number: run(number, few), capacity, first=getattr(recipe, what), most=most,
                  power=WHAT.index(what) + 1, confirm=(lambda number: run(number, steps)) if steps > few else None)


def as_json(found: Search, what: str) -> dict:
    """`largest_batch` or `largest_length`, `tried`, and `next`: what runs out with one more, None if none was tried.

    `steps` of what was tried is how many a run was to survive; the step in which `next` runs out is its `step`.
    """
    tried = [{what: t.number, "fits": t.fits, "peak_allocated_bytes": t.peak_allocated_bytes,
              "peak_reserved_bytes": t.peak_reserved_bytes, "steps": t.steps} for t in found.tried]
    after = found.next and {what: found.next.number, **request(found.next.out_of_memory)}
    return {f"largest_{what}": found.largest, "tried": tried, "next": after}


def with_(experiment: Experiment, **changes) -> Experiment:
    """The experiment with another recipe; ValueError if there is no such recipe."""
    return replace(experiment, recipe=replace(experiment.recipe, **changes))
