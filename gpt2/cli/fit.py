"""`fit`: the largest batch or length that fits, and what runs out beyond it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace

from gpt2.cli import options, tables
from gpt2.cli.predict import advised, host_memory
from gpt2.memory.answer import request

_IDS_LIMIT = 2**26  # tokens of a step that are tried: their ids take 512 MiB of this machine's memory


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of predict; --batch or --length says where the search begins."""
    parser.add_argument("--what", choices=("batch", "length"), default="batch", help="what to make larger (default batch)")
    options.add_card(parser)
    options.add_recipe(parser)
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> None:
    """Search and print."""
    gpu = options.card(arguments)
    experiment = options.experiment(arguments)
    with host_memory():
        found = fit(experiment, gpu, arguments.what, arguments.torch)
    too_much = replace(experiment.recipe, **{arguments.what: (found["next"] or {}).get(arguments.what, 1)})
    if arguments.advise and found["next"]:
        found["advice"] = advised(replace(experiment, recipe=too_much), gpu, arguments.torch)
    print(json.dumps(found, indent=1) if arguments.json else _text(found, experiment, arguments.what, too_much))


def fit(experiment, gpu, what: str = "batch", torch_release: str | None = None) -> dict:
    """The largest `what` of the experiment's recipe on a card, as JSON has it."""
    from gpt2.memory.fit import Trial, search
    from gpt2.memory.trace import Trace
    from gpt2.study.experiments import predict

    recipe, meta = experiment.recipe, {}

    def attempt(number: int) -> Trial:
        trace: Trace = predict(replace(experiment, recipe=replace(recipe, **{what: number})), gpu, torch_release=torch_release)
        meta.update(trace.meta)
        allocated, failure = trace.allocated_bytes(), trace.meta["out_of_memory"]
        later = trace.later()
        return Trial(number, failure is None, max(allocated), max(trace.reserved_bytes()), allocated[-1], failure)
