"""`simulate`: run a training script as python would, on a GPU that is not here.

Exit status: the script's own; 1 if it failed, 0 if the card ran out of memory, which is an answer. Its standard output
is left alone; the summary goes to standard error, and `--json FILE` to a file: a new one, or one that has JSON.

Training steps are counted by optimizer steps: step n ends with the nth. Peaks are over the whole run. `fits` says that
no allocation failed, or that the script caught what failed (`caught` lists it); it is null if the script ended for
another reason (`error`).

Tensors have shapes and no values. A number read prints as nan; a decision that needs one ends the script with one line
that names it. Floats are taken to be finite (guards against nan and inf let the script go on, a GradScaler never skips
a step), arguments of distributions to be valid. torch.compile runs as eager. Files that are saved have zeros for
contents.

Allocator settings come from --alloc-conf, else from PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF. They are read at the
first allocation, so a script may still set them in os.environ, before or after it imports torch. PyTorch itself is
imported before the script begins: what it reads from the environment at that moment comes from outside.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout

from gpt2.cli import options, tables
from gpt2.cli.options import UserError
from gpt2.cli.script import Script, exit_status, print_error

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Ours come first; everything from the script's name on is the script's."""
    options.add_card(parser)
    parser.add_argument("--trace", metavar="OUT", help="save what happened: a trace, or for *.pickle a memory snapshot")
    parser.add_argument("--json", metavar="FILE", help="write the answer as JSON (- for standard output)")
    parser.add_argument("--keeps", action="store_true", help="name what keeps each large block at the peak alive")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, not a script")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py args...", help="as after `python`")


def run(arguments: argparse.Namespace) -> int:
    """Run the script on the card; say what it took."""
    late = arguments.alloc_conf is None
    if late:
        arguments.alloc_conf = environment()
    gpu = options.card(arguments)
    _check_outputs(arguments)
    script = _script(arguments)
    script.check()
    from gpt2.memory.simulator import collect_garbage

    outcome = Outcome()
    collect_garbage()
    with _card(gpu, arguments) as card:
        if late:
            read_environment_late(card)
        outcome.run(script)
        trace = card.trace(argv=script.argv)
    outcome.kept = None
    found = _answer(trace, outcome)
    if arguments.keeps and outcome.error is None:
        found["keeps"] = _keeps(trace, script, lambda: _card(gpu, arguments), late)
    _report(found, trace, arguments)
    return outcome.status


def _script(arguments: argparse.Namespace) -> Script:
    name, *rest = arguments.module or arguments.script or [None]
    if name is None:
        raise UserError("no script: python -m gpt2 simulate --gpu H200 script.py args...")
    return Script(name, tuple(rest), is_module=bool(arguments.module))


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Before minutes are spent: what is to be written can be, and is not where a script or notes are. The paths become
    absolute, because a script may change its folder."""
    for option in ("json", "trace"):
        path = getattr(arguments, option)
        if not path or (option, path) == ("json", "-"):
            continue
        if path.endswith(".py") or option == "json" and _is_something_else(path):
            what = "a script" if path.endswith(".py") else "there and no JSON"
            takes = "a file or -" if option == "json" else "a file"
            raise UserError(f"--{option} of simulate takes {takes} to write to; {path} is {what}")
        options.check_writable(path)
        setattr(arguments, option, os.path.abspath(path))


def _is_something_else(path: str) -> bool:
    """Whether there is a file, not empty, that is no JSON."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if text.strip():
            json.loads(text)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        return True
    return False


def _card(gpu, arguments: argparse.Namespace):
    from gpt2.memory.simulator import SimulatedGpu

    limit = arguments.limit_mib * 2**20 if arguments.limit_mib else None
    return SimulatedGpu(gpu, torch=arguments.torch, limit_bytes=limit, allocator_conf=arguments.alloc_conf,
                        stacks=bool(arguments.trace or arguments.keeps))


class Outcome:
    """How a script ended: `status` is the exit status, `fits` None if it failed for a reason that is not memory."""

    def __init__(self):
        self.status, self.fits, self.error = 0, True, None
        self.kept: object = None  # the script's globals, or its exception: they hold its tensors

    def run(self, script: Script) -> None:
        """Run and keep everything that the script raises."""
        import torch

        from gpt2.memory.values import NotSimulated

        try:
            self.kept = script.run()
        except SystemExit as error:
            self.status = exit_status(error.code)
        except torch.OutOfMemoryError as error:
            self.fits, self.kept = False, error
            print_error(error)
        except NotSimulated as error:
            self.fail(error)
            print(f"error: {error}", file=sys.stderr)
        except Exception as error:
            self.fail(error)
            print_error(error)

    def fail(self, error: Exception) -> None:
        """The script ended by an exception."""
        self.status, self.fits, self.kept = 1, None, error
        self.error = f"{type(error).__name__}: {error}"


def environment() -> str:
    """The allocator settings of the environment, the newer name first."""
    return next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")


def read_environment_late(card) -> None:
    """Have the card read the environment once more at its first allocation, when PyTorch does."""
    from gpt2.memory.caching.settings import Settings

    def first(size: int) -> int:
        del card.malloc
        if (conf := environment()) != card.allocator_conf:
            try:
                card.settings = Settings.parse(conf, card.torch)
            except ValueError as error:
                raise RuntimeError(str(error)) from None
            card.allocator_conf = conf
            card.allocator.configure(card.settings)
        return card.malloc(size)

    card.malloc = first


def _answer(trace, outcome: Outcome) -> dict:
    from gpt2.memory.answer import answer, request

    failures = [request(event._asdict()) for event in trace.events if event.action == "oom"]
    if outcome.fits is not False:
        trace.meta["out_of_memory"] = None
    found = answer(trace, whole_run=True)
    del found["recipe"]
    return found | {"fits": outcome.fits, "argv": trace.meta["argv"], "error": outcome.error,
                    "caught": failures if outcome.fits is not False else failures[:-1]}


def _keeps(trace, script: Script, card, late: bool):
    """Who keeps the blocks at the peak alive. The script runs twice more for it, unheard."""
    from gpt2.memory.keeping.keepers import at_event

    def program(card) -> object:
        if late:
            read_environment_late(card)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            try:
                return script.run()
            except SystemExit:
                return None

    with options.refusing():
        return at_event(trace, trace.peak(), program, card)


def _report(found: dict, trace, arguments: argparse.Namespace) -> None:
    kept = found.pop("keeps", None)
    text = _text(found)
    if kept is not None:
        text += f"\n\n{kept.text()}"
        found["keeps"] = {"rows": [row._asdict() for row in kept.rows],
                          "releases": [dataclasses.asdict(release) for release in kept.releases]}
    if arguments.trace:
        save_trace(trace, arguments.trace)
    if arguments.json:
        write_json(found, arguments.json)
    sys.stdout.flush()
    print(f"\n{text}", file=sys.stderr)


def save_trace(trace, path: str) -> None:
    """A trace of this study, or a snapshot for pytorch.org/memory_viz if the name ends in .pickle."""
    from gpt2.memory import viewer

    try:
        viewer.write(trace, path) if path.endswith(".pickle") else trace.save(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def write_json(found: dict, path: str) -> None:
    """JSON to a file, or to standard output for "-"."""
    text = json.dumps(found, indent=1)
    if path == "-":
        print(text)
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _text(found: dict) -> str:
    title = f"predicted for {found['gpu']}, torch {found['torch']}: {' '.join(found['argv'])}"
    lines = [tables.answer_text(found, title)]
    lines += [f"  caught: {tables.request(failure)}" for failure in found["caught"]]
    lines += [f"  the script failed: {found['error']}"] if found["error"] else []
    return "\n".join(lines)
