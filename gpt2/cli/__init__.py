"""The command line: predict, fit, simulate, record, diff, explain, snapshot, gpus.

    python -m gpt2 predict --gpu A40 --torch 2.5.1 --batch 21

Exit status: 0 done, also when the answer is "does not fit"; 1 the script under `simulate` failed; 2 bad input, with
one line on standard error; 130 interrupted. PyTorch is imported by the commands that need it, when they need it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from gpt2.cli.options import Formatter, Parser, UserError

__all__ = ["COMMANDS", "UserError", "main", "parser"]

COMMANDS = {  # command -> (module, what it does)
    "predict": ("predict", "what a training step of GPT-2 takes on a GPU that is not here"),
    "fit": ("fit", "the largest batch or length that fits, and what runs out beyond it"),
    "simulate": ("simulate", "run a training script as python would, on a GPU that is not here"),
    "record": ("record", "predict's run on the GPU that is here, measured"),
    "diff": ("diff", "where two traces part"),
    "explain": ("explain", "read an out-of-memory message"),
    "snapshot": ("snapshot", "read a memory snapshot, and what it would be on another card"),
    "gpus": ("gpus", "the cards that can be simulated"),
}


def parser() -> argparse.ArgumentParser:
    """All commands with all their options."""
    top = Parser(prog="python -m gpt2", description="What a training step takes on a GPU, to the byte.",
                 formatter_class=Formatter)
    commands = top.add_subparsers(dest="command", metavar="command", required=True)
    for name, (module, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what, formatter_class=Formatter, allow_abbrev=False)
        found = importlib.import_module(f"gpt2.cli.{module}")
        found.add_options(command)
        command.set_defaults(run=found.run)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = parser().parse_args(argv)
    try:
        status = arguments.run(arguments) or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
