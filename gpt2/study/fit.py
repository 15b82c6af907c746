"""How large a batch, or how long a sequence, fits on a card that need not be here."""

from __future__ import annotations

from dataclasses import replace

from gpt2.memory import gpus
from gpt2.memory.answer import answer, request
from gpt2.memory.fit import Search, Trial, search
from gpt2.study.experiments import Experiment, predict

WHAT = ("batch", "length")
MOST_TOKENS = 2**26  # of a step that is tried: their ids take 512 MiB of this machine's memory


def largest(experiment: Experiment, gpu: gpus.Gpu, what: str = "batch", torch_release: str | None = None) -> Search:
    """The largest batch or length with which the experiment fits on the card; the search begins at the recipe's."""
    recipe = experiment.recipe

    def attempt(number: int) -> Trial:
        trace = predict(with_(experiment, **{what: number}), gpu, torch_release=torch_release)
        found = answer(trace, owners=False)
        return Trial(number, found["fits"], found["peak_allocated_bytes"], found["peak_reserved_bytes"],
                     trace.marks[-1].allocated_bytes if trace.marks else 0, found["out_of_memory"])

    capacity = min(gpu.free_bytes_at_start, experiment.limit_bytes or gpu.free_bytes_at_start)
    most = recipe.size.context if what == "length" else max(MOST_TOKENS // recipe.length, recipe.batch)
    return search(attempt, capacity, first=getattr(recipe, what), most=most, power=WHAT.index(what) + 1)


def as_json(found: Search, what: str) -> dict:
    """`largest_batch` or `largest_length`, `tried`, and `next`: what runs out with one more, None if none was tried."""
    tried = [{what: t.number, "fits": t.fits, "peak_allocated_bytes": t.peak_allocated_bytes,
              "peak_reserved_bytes": t.peak_reserved_bytes} for t in found.tried]
    after = found.next and {what: found.next.number, **request(found.next.out_of_memory)}
    return {f"largest_{what}": found.largest, "tried": tried, "next": after}


def with_(experiment: Experiment, **changes) -> Experiment:
    """The experiment with another recipe; ValueError if there is no such recipe."""
    return replace(experiment, recipe=replace(experiment.recipe, **changes))
