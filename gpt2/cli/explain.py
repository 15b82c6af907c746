"""`explain "message"`: read an out-of-memory message, of any PyTorch; from a file if it is the name of one, `-` for
standard input."""

from __future__ import annotations

import argparse
import os
import sys

from gpt2.cli.options import UserError, positive, refusing


def add_options(parser: argparse.ArgumentParser) -> None:
    """The message, and what is known of the run."""
    parser.add_argument("message", help="the message, or all that was printed; a file with it; - for standard input")
    parser.add_argument("--model", default="124M", help="whose shapes to look for (default 124M)")
    parser.add_argument("--batch", type=positive, metavar="N", help="if it is known")
    parser.add_argument("--length", type=positive, metavar="N", help="if it is known")
    parser.add_argument("--vocabulary", type=positive, metavar="N", help="if it is not the model's")
    parser.add_argument("--alloc-conf", default="", metavar="STR", help="PYTORCH_CUDA_ALLOC_CONF of the run")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def run(arguments: argparse.Namespace) -> None:
    """Explain and print."""
    from gpt2.memory.explain import explain

    with refusing():
        message = _read(arguments.message)
        found = explain(message, model=arguments.model, batch=arguments.batch, length=arguments.length,
                        vocabulary=arguments.vocabulary, allocator_conf=arguments.alloc_conf)
    print(found.to_json() if arguments.json else found.text())


def _read(named: str) -> str:
    """The message: what was typed, unless that is `-` or the name of something that exists."""
    if named == "-":
        text, where = sys.stdin.read(), "standard input"
    elif os.path.isdir(named):
        raise UserError(f"{named} is a directory; explain takes a message, a file that has it, or -")
    elif os.path.exists(named):
        try:
            with open(named, encoding="utf-8", errors="replace") as file:
                text, where = file.read(), named
        except OSError as error:
            raise UserError(f"cannot read {named}: {error.strerror}") from None
    else:
        return named
    if not text.strip():
        raise UserError(f"{where} is empty")
    return text
