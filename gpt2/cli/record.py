"""`record`: predict's run on the GPU that is here, measured."""

from __future__ import annotations

import argparse
import os

from gpt2.cli import options
from gpt2.cli.options import UserError, refusing
from gpt2.cli.predict import advice, note_steps, one_line, show


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of predict; --gpu and --torch, if given, must be what is here."""
    options.add_card(parser)
    options.add_recipe(parser)
    options.add_steps(parser, f"training steps to run (default {options.DEFAULT_STEPS})")
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> None:
    """Record and print."""
    from gpt2.memory.caching.settings import Settings

    with refusing():
        Settings.parse(arguments.alloc_conf or "", options.installed_torch())
    options.check_limit(arguments.limit_mib)
    if arguments.alloc_conf:  # read once, before the first allocation
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = arguments.alloc_conf
    import torch

    if not torch.cuda.is_available():
        raise UserError("no GPU here; use predict")
    _check_machine(arguments, torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    experiment = options.experiment(arguments)
    from gpt2.memory.answer import answer
    from gpt2.study.experiments import record

    with one_line(experiment):
        found = options.with_asked(answer(record(experiment)), experiment)
    note_steps(found, experiment, None)
    if arguments.advise and not found["fits"]:
        from gpt2.memory import gpus

        found["advice"] = advice(experiment, gpus.find(found["gpu"]), arguments)
    show(found, experiment, arguments.json)


def _check_machine(arguments: argparse.Namespace, here: str, total_bytes: int) -> None:
    from gpt2.memory import gpus

    if arguments.gpu:
        with refusing():
            wanted = gpus.find(arguments.gpu).device_name
        if wanted != here:
            raise UserError(f"the GPU here is {here}, not {wanted}; leave --gpu out, or use predict")
    installed = options.installed_torch()
    if arguments.torch and arguments.torch != installed:
        raise UserError(f"torch here is {installed}, not {arguments.torch}; leave --torch out, or use predict")
    if arguments.limit_mib and arguments.limit_mib * 2**20 > total_bytes:
        raise UserError(f"--limit-mib {arguments.limit_mib} is above the {total_bytes // 2**20:,} MiB of the GPU here")
