"""Run somebody's script as `python script.py args...` would, and show its errors as Python would."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from gpt2.cli.options import UserError

_PACKAGE = str(Path(__file__).resolve().parents[1])
_RUNNERS = (str(Path(__file__).parent), "<frozen runpy>", "<frozen importlib", runpy.__file__)
_DOORS = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")  # how PyTorch calls what simulates its kernels


@dataclass(frozen=True)
class Script:
    """A file or, with `is_module`, a module by name; and its arguments."""

    name: str
    arguments: tuple[str, ...]
    is_module: bool = False

    @property
    def argv(self) -> list[str]:
        """What the script finds in sys.argv; a module finds its file at the front."""
        return [self.name, *self.arguments]

    def check(self) -> None:
        """Raise UserError if there is no such script."""
        if self.is_module:
            sys.path[0] = os.getcwd()
            try:
                found = importlib.util.find_spec(self.name)
            except (ImportError, ValueError):
                found = None
            if found is None:
                raise UserError(f"no module named {self.name!r}")
        elif not os.path.exists(self.name):
            raise UserError(f"no such script: {self.name}")
        elif os.path.isdir(self.name) and not os.path.exists(os.path.join(self.name, "__main__.py")):
            raise UserError(f"{self.name} is a directory without a __main__.py")

    def run(self) -> dict:
        """Run it to its end; returns its globals, which keep alive what it made. Raises what it raises."""
        sys.argv = self.argv
        if self.is_module:
            return runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        if os.path.isfile(self.name):
            sys.path[0] = os.path.dirname(os.path.abspath(self.name))
        return runpy.run_path(self.name, run_name="__main__")


def print_error(error: BaseException) -> None:
    """The traceback on standard error, without the frames of what runs the script and of what simulates kernels."""
    shown = traceback.TracebackException.from_exception(error)
    _clean(shown)
    sys.stdout.flush()
    print("".join(shown.format()), end="", file=sys.stderr)


def _clean(shown: traceback.TracebackException | None) -> None:
    if shown is None:
        return
    frames = [frame for frame in shown.stack if not frame.filename.startswith(_RUNNERS)]
    kernel = next((i for i, frame in enumerate(frames) if frame.filename.startswith(_PACKAGE)), len(frames))
    while 0 < kernel < len(frames) and frames[kernel - 1].filename.endswith(_DOORS):
        kernel -= 1
    shown.stack = traceback.StackSummary.from_list(frames[:kernel])
    for inner in (shown.__cause__, shown.__context__, *(getattr(shown, "exceptions", None) or ())):
        _clean(inner)


def exit_status(code: object) -> int:
    """The status that `sys.exit(code)` gives a process; a text is printed."""
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr)
    return 1
