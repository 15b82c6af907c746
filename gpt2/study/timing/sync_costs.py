"""What it costs to make the host wait, and how often each habit does so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pandas as pd
import torch

from gpt2.step import Recipe
from gpt2.study import syncs
from gpt2.study.timing import stopwatch
from gpt2.study.timing.stream import BF16, FP32, Loop, facts, small

RECIPES = {"fp32": FP32, "bf16-sdpa": BF16, "bf16-sdpa-1": replace(BF16, batch=1)}


def plain(loop: Loop) -> None:
    """A step and nothing else."""
    loop.step()


def item(loop: Loop) -> None:
    """`loss.item()` after the step."""
    loop.step().item()


def cpu(loop: Loop) -> None:
    """`loss.cpu()`."""
    loop.step().cpu()


def printing(loop: Loop) -> None:
    """What `print(loss)` does before anything is written."""
    repr(loop.step())


def logged(loop: Loop) -> None:
    """A debug message that nobody will see; the value is read to make its text."""
    logging.getLogger("never shown").debug(f"loss {loop.step().item()}")


def nonzero(loop: Loop) -> None:
    """A shape that depends on data: how many of the tokens are 0."""
    (loop.training.tokens == 0).nonzero()
    loop.step()


def condition(loop: Loop) -> None:
    """`if loss > 100:`."""
    if loop.step() > 100:
        raise RuntimeError("the loss is too high")


def blocking_copy(loop: Loop) -> None:
    """The batch from pageable memory, without non_blocking."""
    loop.training.tokens = loop.pageable.to("cuda")
    loop.training.step(loop.number)


def synchronize(loop: Loop) -> None:
    """`torch.cuda.synchronize()` after the step."""
    loop.step()
    torch.cuda.synchronize()


def read(module, inputs, output) -> None:
    """A forward hook that reads one number of the module's output."""
    if isinstance(output, torch.Tensor):
        output.detach().flatten()[0].item()


def per_layer(loop: Loop) -> None:
    """One number of each block's output, as a monitor of activations would read it."""
    _hooked(loop, loop.training.model.transformer.h)


def per_module(loop: Loop) -> None:
    """One number of the output of every module that has no modules inside."""
    _hooked(loop, [m for m in loop.training.model.modules() if not list(m.children())])


def _hooked(loop: Loop, modules) -> None:
    hooks = [module.register_forward_hook(read) for module in modules]
    try:
        loop.step()
    finally:
        for hook in hooks:
            hook.remove()


HABITS: dict[str, tuple[str, Callable[[Loop], None]]] = {
    "plain": ("nothing", plain),
    "item": ("loss.item() once a step", item),
    "cpu": ("loss.cpu() once a step", cpu),
    "print": ("print(loss) once a step", printing),
    "logging": ("a debug message with loss.item()", logged),
    "nonzero": ("nonzero() once a step", nonzero),
    "condition": ("if loss > 100", condition),
    "copy": ("batch from pageable memory, blocking", blocking_copy),
    "synchronize": ("torch.cuda.synchronize() once a step", synchronize),
    "per layer": ("item() after each block", per_layer),
    "per module": ("item() after each module", per_module),
}


def ready(recipe: Recipe) -> Loop:
    """A loop that has run, with a pageable copy of its batch."""
    loop = Loop(recipe)
    loop.pageable = loop.training.tokens.cpu()
    loop.steps(3)
    return loop


def counts(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """Syncs in one step of each habit."""
    loop, rows = ready(small(BF16, tiny)), []
    for name, (says, habit) in HABITS.items():
        habit(loop)
        try:
            report, error = syncs.count(partial(habit, loop)), ""
        except Exception as failure:
            report, error = syncs.Syncs(), f"{type(failure).__name__}: {failure}".splitlines()[0]
        where = "; ".join(dict.fromkeys(place for _, place in report.waits))
        rows.append({"habit": name, "says": says, "sync_count": report.count, "where": where, "error": error})
    return {"05-sync-counts": pd.DataFrame(rows)}


def costs(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """Wall-clock time of a step with each habit; the habits take turns, so that a drift meets all alike."""
    rows = []
    for name, recipe in list(RECIPES.items())[:1 if tiny else None]:
        loop, slow = ready(small(recipe, tiny)), recipe.precision == "fp32"
        readings: dict[str, list[float]] = {habit: [] for habit in HABITS}
        for _ in range(1 if tiny else 3 if slow else 5):
            for habit, (_, function) in HABITS.items():
                calls = 2 if slow or tiny else 8
                readings[habit] += stopwatch.per_call(partial(function, loop), calls, rounds=1, warmup=1)
        rows += [{**facts(name, recipe), "habit": habit, "says": HABITS[habit][0], **stopwatch.spread(times)}
                 for habit, times in readings.items()]
        del loop
        torch.cuda.empty_cache()
    return {"05-sync-costs": pd.DataFrame(rows)}
