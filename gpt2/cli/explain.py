"""`explain "message"`: read an out-of-memory message, of any PyTorch; `-` reads it from standard input."""

from __future__ import annotations

import argparse
import sys

from gpt2.cli.options import positive, refusing


def add_options(parser: argparse.ArgumentParser) -> None:
    """The message, and what is known of the run."""
    parser.add_argument("message", help="the message, or all that was printed; - for standard input")
    parser.add_argument("--model", default="124M", help="whose shapes to look for (default 124M)")
    parser.add_argument("--batch", type=positive, metavar="N", help="if it is known")
    parser.add_argument("--length", type=positive, metavar="N", help="if it is known")
    parser.add_argument("--vocabulary", type=positive, metavar="N", help="if it is not the model's")
    parser.add_argument("--alloc-conf", default="", metavar="STR", help="PYTORCH_CUDA_ALLOC_CONF of the run")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def run(arguments: argparse.Namespace) -> None:
    """Explain and print."""
    from gpt2.memory.explain import explain

    message = sys.stdin.read() if arguments.message == "-" else arguments.message
    with refusing():
        found = explain(message, model=arguments.model, batch=arguments.batch, length=arguments.length,
                        vocabulary=arguments.vocabulary, allocator_conf=arguments.alloc_conf)
    print(found.to_json() if arguments.json else found.text())
