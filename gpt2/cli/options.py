"""Options that several commands share, and how what was typed becomes an experiment."""

from __future__ import annotations

import argparse
import math
import os
import sys
from contextlib import contextmanager
from typing import NoReturn

_SIZES = ("layers", "width", "heads", "vocabulary", "context")
_IDS_BYTES_LIMIT = 4 * 2**30  # token ids are real host tensors: beyond this the machine, not the card, is the matter
_SMALLEST_LIMIT_MIB = 2  # the allocator's smallest segment
_MOST = {"layers": 1000, "steps": 1000, "accumulate": 1000,  # each takes this machine's time, on any card
         **dict.fromkeys(("width", "heads", "vocabulary", "context"), 2**24)}  # beyond, sizes in bytes overflow
BACKENDS = ("auto", "flash", "efficient", "cudnn", "math")
DEFAULT_STEPS = 3


class UserError(Exception):
    """What was typed cannot be done; the text is the one line that says why."""


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {' '.join(message.split())} ({self.prog} --help lists what there is)", file=sys.stderr)
        raise SystemExit(2)


class Formatter(argparse.HelpFormatter):
    """Help with room for the option names."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=110)


@contextmanager
def refusing():
    """A ValueError of what is inside is about what was typed."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def finite(text: str) -> float:
    """A number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return number


def add_card(parser: argparse.ArgumentParser) -> None:
    """Which card, which PyTorch, under which limit."""
    add = parser.add_argument
    add("--gpu", metavar="NAME", help="the card; `python -m gpt2 gpus` lists them")
    add("--torch", metavar="RELEASE", help="whose rules to follow, from 2.5 on (default: the installed release)")
    add("--limit-mib", type=positive, metavar="N", help="what the process may reserve (default: what is free)")
    add("--alloc-conf", metavar="STR", help="as in PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True")


def at_most(name: str):
    """A whole number from 1 to what is sensible for `name`."""

    def number(text: str) -> int:
        found = positive(text)
        if found > _MOST[name]:
            raise argparse.ArgumentTypeError(f"must be at most {_MOST[name]:,}, not {found:,}")
        return found

    return number


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """What a step does. Values are checked by `gpt2.step.Recipe`, which knows them."""
    add = parser.add_argument_group("the training step").add_argument
    add("--model", default="124M", help="tiny, 124M (default), 350M, 774M, 1558M or 1.3B")
    add("--batch", type=positive, default=8, metavar="N", help="sequences of a micro-batch (default 8)")
    add("--length", type=positive, metavar="N", help="tokens of each (default 1024, or the model's context if shorter)")
    add("--precision", default="fp32", help="fp32 (default), bf16 or fp16 autocast")
    add("--attention", default="explicit", help="explicit (default) or sdpa, which is fused")
    add("--backend", default="auto", metavar="NAME",
        help=f"of fused attention: {', '.join(BACKENDS)} (default auto: PyTorch's choice)")
    add("--checkpoint", default="none", help="none (default), block, every-2, every-3, ..., attention or mlp")
    add("--loss", default="full", help="full (default), chunked, or liger where liger-kernel is installed")
    add("--loss-chunks", type=positive, metavar="N", help="chunks of a chunked loss (default 8)")
    add("--optimizer", default="foreach", help="AdamW's form: foreach (default), fused or loop")
    add("--moments", default="fp32", help="AdamW's moments: fp32 (default) or bf16")
    add("--step-in-backward", action="store_true", help="update each parameter when its gradient is there")
    add("--accumulate", type=at_most("accumulate"), default=1, metavar="N",
        help="micro-batches of a step, --batch sequences each (default 1)")
    add("--clip", type=finite, default=0.0, metavar="NORM", help="clip gradients to this norm (default 0: do not)")
    add("--dropout", type=finite, default=0.0, metavar="P", help="dropout, from 0 to below 1 (default 0)")
    add("--drop-logits", action="store_true", help="del logits before backward")
    add("--keep-gradients", action="store_true", help="zero_grad(set_to_none=False)")
    for name in _SIZES:
        add(f"--{name}", type=at_most(name), metavar="N", help=f"{name}, instead of the model's")


def add_steps(parser: argparse.ArgumentParser, words: str) -> None:
    """How many steps; None if it is not said."""
    parser.add_argument("--steps", type=at_most("steps"), metavar="N", help=words)


def add_output(parser: argparse.ArgumentParser) -> None:
    """What is printed."""
    parser.add_argument("--advise", action="store_true",
                        help="if it does not fit: the cheapest changes that help, by time lost and risk")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def card(arguments: argparse.Namespace):
    """The card that was named. Needs no PyTorch. Checks release, allocator options and limit as well."""
    from gpt2.memory import gpus
    from gpt2.memory.caching.settings import Settings
    from gpt2.memory.software import software

    if not arguments.gpu:
        raise UserError(f"--gpu is missing; known: {', '.join(gpus.names())}")
    with refusing():
        gpu = gpus.find(arguments.gpu)
        release = arguments.torch or installed_torch()
        software(release, gpu)
        note_release(release)
        check_settings(Settings.parse(arguments.alloc_conf or "", release))
    check_limit(arguments.limit_mib, gpu)
    return gpu


def note_release(release: str) -> None:
    """Say on standard error that nobody has looked at this release's rules yet. ValueError if it is no release."""
    from gpt2.memory.software import KNOWN, version

    if version(release) > version(KNOWN[-1]):
        print(f"note: torch {release} is newer than any known release: the rules are those of {KNOWN[-1]}",
              file=sys.stderr)


def check_settings(settings) -> None:
    """Say on standard error what the reader should know about a combination of allocator options."""
    for warning in settings.warnings:
        print(f"note: {warning}", file=sys.stderr)


def check_limit(limit_mib: int | None, gpu=None) -> None:
    """A process that may not even have one segment has nothing to tell, and none may have more than the card."""
    if limit_mib is None:
        return
    if limit_mib < _SMALLEST_LIMIT_MIB:
        raise UserError(f"--limit-mib {limit_mib} is below the allocator's smallest segment, {_SMALLEST_LIMIT_MIB} MiB")
    if gpu is not None and limit_mib * 2**20 > gpu.memory_bytes:
        raise UserError(f"--limit-mib {limit_mib:,} is above the {gpu.memory_bytes // 2**20:,} MiB of an {gpu.name}")


def installed_torch() -> str:
    """The installed release, such as "2.13.0", without importing it."""
    from importlib.metadata import version

    return version("torch").partition("+")[0]


def model_name(arguments: argparse.Namespace) -> str:
    """The model's name, after its size has been made known if it is not one of ours."""
    from dataclasses import replace

    from gpt2.model import SIZES, size

    changed = {name: getattr(arguments, name) for name in _SIZES if getattr(arguments, name) is not None}
    with refusing():
        other = replace(size(arguments.model), **changed)
    name = "-".join([arguments.model, *(f"{key}{value}" for key, value in changed.items())])
    SIZES.setdefault(name, other)
    return name


def recipe(arguments: argparse.Namespace):
    """The Recipe of what was typed; UserError says what is wrong with it."""
    from gpt2.model import size
    from gpt2.step import Recipe

    name = model_name(arguments)
    length = arguments.length or min(1024, size(name).context)
    check_tokens(arguments.batch, length)
    chunks = _chunks(arguments, length)
    with refusing():
        return Recipe(
            model=name, batch=arguments.batch, length=length, precision=arguments.precision,
            attention=arguments.attention, checkpoint=arguments.checkpoint, loss=arguments.loss,
            loss_chunks=chunks, optimizer=arguments.optimizer, accumulate=arguments.accumulate,
            clip=arguments.clip, dropout=arguments.dropout, moments=arguments.moments,
            step_in_backward=arguments.step_in_backward, keep_logits=not arguments.drop_logits,
            set_to_none=not arguments.keep_gradients)


def _chunks(arguments: argparse.Namespace, length: int) -> int:
    """Of the loss; UserError where they say nothing."""
    from gpt2.step import Recipe

    chunks, tokens = arguments.loss_chunks, arguments.batch * length
    if chunks is None:
        return Recipe.loss_chunks
    if arguments.loss == "full":
        raise UserError("--loss-chunks needs --loss chunked")
    if chunks > tokens:
        raise UserError(f"--loss-chunks {chunks:,} is above the {tokens:,} tokens of a micro-batch")
    return chunks


def check_tokens(batch: int, length: int) -> None:
    """Token ids live on the host, also where the card is simulated."""
    size = batch * (length + 1) * 8
    if size > _IDS_BYTES_LIMIT:
        raise UserError(f"batch {batch:,} x length {length:,}: the token ids alone need {size / 2**30:,.0f} GiB of "
                        "this machine's memory; no card here holds such a step")


def backend(arguments: argparse.Namespace) -> str:
    """The implementation of fused attention that was named, "" for PyTorch's choice."""
    if arguments.backend not in BACKENDS:
        raise UserError(f"--backend {arguments.backend!r} is not one of: {', '.join(BACKENDS)}")
    if arguments.backend == "auto":
        return ""
    if arguments.attention != "sdpa":
        raise UserError(f"--backend {arguments.backend} needs --attention sdpa: explicit attention is not fused")
    return arguments.backend


def experiment(arguments: argparse.Namespace):
    """The Experiment of what was typed."""
    chosen = backend(arguments)
    from gpt2.study.experiments import Experiment

    return Experiment(arguments.command, recipe(arguments), steps=arguments.steps or DEFAULT_STEPS, backend=chosen,
                      limit_mib=arguments.limit_mib, alloc_conf=arguments.alloc_conf or "")


def check_writable(path: str) -> None:
    """Whether a file can be written, as far as can be told without doing it; UserError if not."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise UserError(f"cannot write {path}: it is a directory")
    if not os.path.isdir(folder):
        raise UserError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UserError(f"cannot write {path}: not allowed")


def asked(experiment, steps: int | None = None) -> dict:
    """What an answer's JSON has of an experiment beside its recipe; `steps` if they are not the experiment's."""
    return {"backend": experiment.backend or "auto", "alloc_conf": experiment.alloc_conf,
            "limit_mib": experiment.limit_mib, "steps": steps or experiment.steps}


def with_asked(found: dict, experiment) -> dict:
    """An answer, with what was asked after its recipe."""
    head = {key: found[key] for key in ("kind", "gpu", "torch", "recipe")}
    return head | asked(experiment) | found
