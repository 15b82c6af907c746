"""How often one training step makes the host wait for the device, and where.

    report = count(step)            # on a real GPU, or inside SimulatedGpu
    report.count, report.places

On a real GPU PyTorch itself says when an operation waits (`torch.cuda.set_sync_debug_mode`); on a simulated one the
calls that would wait are watched. Explicit waits (`synchronize` of the device, a stream, an event) count in both.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_NOT_THE_USER = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1] / "memory"), __file__)
_SAID = "called a synchronizing CUDA operation"
_READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__repr__")
_OF_UNKNOWN_SIZE = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default,
                    aten.unique_consecutive.default, aten.bincount.default, aten.repeat_interleave.Tensor,
                    aten.equal.default, aten.is_nonzero.default, aten._local_scalar_dense.default}


@dataclass
class Syncs:
    """What made the host wait, in order: (what, file:line)."""

    waits: list[tuple[str, str]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.waits)

    @property
    def places(self) -> dict[tuple[str, str], int]:
        """How often each (what, file:line) waited."""
        return dict(Counter(self.waits))

    def note(self, what: str) -> None:
        """One more wait, from the line of the user's program that is running."""
        self.waits.append((what, _user_line()))


def count(step: Callable[[], object]) -> Syncs:
    """Run `step` once and say how often it waited. Raises RuntimeError where there is no GPU, real or simulated.

    Call it once before on a real GPU: a first step loads kernels and may wait for that.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU to wait for; count inside SimulatedGpu")
    report = Syncs()
    with ExitStack() as stack:
        _watch_explicit(stack, report)
        if is_simulated():
            _watch_reads(stack, report)
            stack.enter_context(_Watch(report))
            step()
        else:
            _listen(stack, report, step)
    return report


def is_simulated() -> bool:
    """Whether `torch.cuda` is answered by a SimulatedGpu at present."""
    return torch.cuda.Stream.__module__.startswith("gpt2.memory")


def _user_line() -> str:
    """file:line of the innermost frame that is neither PyTorch's nor the instrument's."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USER):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "an unknown line"


def _listen(stack: ExitStack, report: Syncs, step: Callable[[], object]) -> None:
    """PyTorch's own warnings, one for each operation that waits."""
    before = torch.cuda.get_sync_debug_mode()
    stack.callback(torch.cuda.set_sync_debug_mode, before)
    caught = stack.enter_context(warnings.catch_warnings(record=True))
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    step()
    report.waits += [("operation", f"{Path(w.filename).name}:{w.lineno}") for w in caught if _SAID in str(w.message)]


def _watch_explicit(stack: ExitStack, report: Syncs) -> None:
    for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
        what = f"{owner.__name__.removeprefix('torch.')}.synchronize"
        _replace(stack, owner, "synchronize", report, what, lambda *a, **k: True)


def _watch_reads(stack: ExitStack, report: Syncs) -> None:
    for name in _READS:
        what = "print" if name == "__repr__" else name.strip("_")
        _replace(stack, torch.Tensor, name, report, what, lambda t, *a, **k: t.is_cuda)


def _replace(stack: ExitStack, owner, name: str, report: Syncs, what: str, waits: Callable[..., bool]) -> None:
    real = getattr(owner, name)

    def noted(*args, **kwargs):
        if waits(*args, **kwargs):
            report.note(what)
        return real(*args, **kwargs)

    own = name in vars(owner)
    setattr(owner, name, noted)
    stack.callback(setattr, owner, name, real) if own else stack.callback(delattr, owner, name)


class _Watch(TorchDispatchMode):
    """Sees operators that wait: results of unknown size, and blocking copies between host and device."""

    def __init__(self, report: Syncs):
        super().__init__()
        self.report = report

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        what = self._why(func, args, kwargs)
        if what:
            self.report.note(what)
        return func(*args, **kwargs)

    @staticmethod
    def _why(func, args, kwargs) -> str:
        if func is aten._to_copy.default:
            source, target = args[0], kwargs.get("device")
            if target is None or target.type not in ("cuda", "cpu") or kwargs.get("non_blocking"):
                return ""
            return f"copy to {target.type}" if (target.type == "cuda") != source.is_cuda else ""
        if func is aten.copy_.default:
            target, source = args[:2]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            return f"copy to {target.device.type}" if waits and target.is_cuda != source.is_cuda else ""
        on_card = any(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
        if func in _OF_UNKNOWN_SIZE and on_card:
            return func.overloadpacket.__name__
        if func is aten.index.Tensor and on_card and any(i is not None and i.dtype == torch.bool for i in args[1]):
            return "index by a mask"
        return ""
