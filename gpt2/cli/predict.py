"""`predict`: what a training step takes on a GPU that is not here."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import contextmanager

from gpt2.cli import options, tables
from gpt2.cli.options import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Card, step, output."""
    options.add_card(parser)
    options.add_recipe(parser)
    options.add_steps(parser, f"training steps to run (default {options.DEFAULT_STEPS})")
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> None:
    """Predict and print."""
    gpu = options.card(arguments)
    experiment = options.experiment(arguments)
    found = predicted(experiment, gpu, arguments.torch)
    note_steps(found, experiment, arguments.torch)
    if arguments.advise and not found["fits"]:
        found["advice"] = advice(experiment, gpu, arguments)
    show(found, experiment, arguments.json)


def predicted(experiment, gpu, torch_release: str | None) -> dict:
    """The answer for an experiment on a simulated card."""
    from gpt2.memory.answer import answer
    from gpt2.study.experiments import predict

    with one_line(experiment):
        return options.with_asked(answer(predict(experiment, gpu, torch_release=torch_release)), experiment)


def advice(experiment, gpu, arguments: argparse.Namespace) -> list[dict]:
    """What would make it fit; a line on standard error for each trial, because they take a second each."""
    from gpt2.study.advise import advise

    with one_line(experiment):
        return advise(experiment, gpu, arguments.torch, tell=lambda line: print(line, file=sys.stderr, flush=True))


def note_steps(found: dict, experiment, torch_release: str | None) -> None:
    """Say on standard error that a run was too short to call its batch one that fits."""
    from gpt2.study.fit import enough_steps

    enough = enough_steps(experiment, torch_release)
    if found["fits"] and experiment.steps < enough:
        print(f"note: fits for {experiment.steps} steps; with expandable segments a step may run out of memory after "
              f"others that did not: --steps {enough} tells", file=sys.stderr)


def show(found: dict, experiment, as_json: bool) -> None:
    """Print an answer."""
    if as_json:
        print(json.dumps(found, indent=1))
        return
    limit = f", limit {experiment.limit_mib:,} MiB" if experiment.limit_mib else ""
    conf = f", {experiment.alloc_conf}" if experiment.alloc_conf else ""
    title = f"{found['kind']} for {found['gpu']}, torch {found['torch']}{limit}{conf}: {described(experiment)}"
    print("\n".join([tables.answer_text(found, title), *tables.advice_lines(found.get("advice"), "this step")]))


def described(experiment) -> str:
    """The recipe in a line, with the backend if one was forced."""
    forced = f", backend {experiment.backend}" if experiment.backend else ""
    return experiment.recipe.describe() + forced


@contextmanager
def one_line(experiment):
    """Turns what this machine cannot lay out, and what a forced backend cannot do, into one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            raise UserError("out of memory on this machine, not on the card: it cannot lay out such a step") from None
        if experiment.backend and "No available kernel" in str(error):
            what = f"--backend {experiment.backend} does not run in {experiment.recipe.precision} on this card"
            raise UserError(f"{what}: {error}") from None
        raise
