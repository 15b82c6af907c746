"""Reading a value that does not exist.

A simulated tensor has a shape and no contents. Reading one gives a stand-in that prints as `nan`, is warned about
once, and refuses to be compared: a program that branches on it would go a way nobody knows. What `float()` gives is
made a plain nan by Python itself; so the instructions after it tell whether it is compared at once.
"""

from __future__ import annotations

import dis
import functools
import json.encoder
import math
import os
import sys
import sysconfig
import types
import warnings
from itertools import chain, pairwise
from pathlib import Path

import torch

_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_JSON = json.encoder.__file__
_INIT = torch.nn.init.__file__
_CHECKS = str(Path(torch.__file__).parent / "distributions" / "distribution.py")
STAND_IN_LIMIT = 1_048_576  # elements: a larger tensor brought to the host stays without values


class NotSimulated(RuntimeError):
    """The program asks for something that a simulated GPU does not have; the message begins with its line."""


class ValueReadError(NotSimulated):
    """The program's course depends on a value that a simulation does not have."""


def user_line() -> str:
    """file:line of the program: of the innermost frame outside PyTorch and this package, and where that is a library's,
    of the innermost frame of the program itself, too."""
    frame, inner = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, _TORCH, "<frozen")):
            here = f"{name}:{frame.f_lineno}"
            if f"{os.sep}site-packages{os.sep}" not in name and not name.startswith(_PYTHON):
                return f"{here} (in {inner})" if inner else here
            inner = inner or here
        frame = frame.f_back
    return inner or "an unknown line"


def initialising() -> bool:
    """Whether torch.nn.init is at work: its loops over values may end at once."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
        if frame.f_code.co_filename == _INIT:
            return True
        frame = frame.f_back
    return False


def validating() -> bool:
    """Whether torch.distributions checks its arguments: they are taken to be valid."""
    return sys._getframe(2).f_code.co_filename == _CHECKS


def unsupported(what: str, why: str) -> NotSimulated:
    """The error for what is not simulated at all."""
    return NotSimulated(f"{user_line()}: {what} is not simulated: {why}")


def branch(what: str) -> ValueReadError:
    """The error for a decision that needs a value."""
    return ValueReadError(
        f"{user_line()}: {what} needs the value of a tensor, and a simulated GPU computes none; "
        "decide by something that is known without running (a step number, a shape)"
    )


_warned = False


def _warn() -> None:
    global _warned
    if not _warned:
        _warned = True
        warn("the value of a simulated tensor is read: it prints as nan; a float() kept in a variable is a plain nan "
             "and compares false (said once)")


def warn(text: str) -> None:
    """A warning at the program's line."""
    where, _, line = user_line().partition(" ")[0].rpartition(":")
    warnings.warn_explicit(text, UserWarning, where, int(line) if line.isdigit() else 0)


class Unknown(float):
    """The stand-in for a number read from a simulated tensor. It is nan, and comparing it is an error.

    `math.isnan` and its kin take it for an ordinary number while a GPU is simulated, and it equals itself and is not
    infinite: a training loop that stops at a loss that is not finite goes on.
    """

    def __new__(cls, _=math.nan):  # copies are made with a value
        return super().__new__(cls, math.nan)

    def _refuse(self, *_):
        raise branch("a comparison or a branch")

    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __index__ = _refuse

    def __eq__(self, other):
        if other is self or isinstance(other, float) and not isinstance(other, Unknown) and math.inf == abs(other):
            return other is self
        return self._refuse()

    def __ne__(self, other):
        return sys._getframe(1).f_code.co_filename == _JSON or not self == other  # written as NaN

    __hash__ = float.__hash__

    def _stay(self, *_):
        return Unknown()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _stay
    __floordiv__ = __mod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = __round__ = _stay


def read(tensor: torch.Tensor) -> Unknown:
    """What `.item()` gives."""
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    _warn()
    return Unknown()


def number(tensor: torch.Tensor) -> float:
    """What `float()` gives. It is called by its program's frame without another between."""
    found, frame = read(tensor), sys._getframe(2)
    if not frame.f_code.co_filename.startswith((_OURS, _TORCH)) and _decides(frame.f_code, frame.f_lasti):
        raise branch("a comparison or a branch")
    return float(found)


_SKIPPED = {"CACHE", "EXTENDED_ARG", "NOP", "RESUME"}
_BY_TRUTH = ("IF_TRUE", "IF_FALSE", "IF_TRUE_OR_POP", "IF_FALSE_OR_POP")
_LOADS = {"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_NAME",
          "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "STORE_FAST_LOAD_FAST"}
_STORES = {"STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "STORE_FAST_LOAD_FAST"}


@functools.lru_cache(maxsize=4096)
def _decides(code: types.CodeType, offset: int) -> bool:
    """Whether the result of the call at `offset` is compared, or branched on, by the instructions that follow.

    `above` counts what lies on the stack above the result: the other operand, made of names, attributes and elements.
    """
    following = (i.opname for i in dis.get_instructions(code) if i.offset >= offset and i.opname not in _SKIPPED)
    call, above = next(following, ""), 0
    if not call.startswith(("CALL", "PRECALL")):
        return False
    for last, name in pairwise(chain([call], following)):
        if name in ("COMPARE_OP", "CONTAINS_OP"):
            return above < 2
        if above == 0 and (name in ("TO_BOOL", "UNARY_NOT") or "JUMP" in name and name.endswith(_BY_TRUTH)):
            return True
        if name in ("SWAP", "COPY") or name == "CALL" and last == "PRECALL" and above == 0:
            continue
        if name in _STORES and last == "COPY" and above == 0:
            above += name in _LOADS
        elif name in _LOADS - _STORES:
            above += 1
        elif name == "LOAD_FAST_LOAD_FAST":
            above += 2
        elif name in ("BINARY_SUBSCR", "BINARY_OP") and above > 1:
            above -= 1
        elif name != "LOAD_ATTR" or above == 0:
            return False
    return False


def forget(tensor: torch.Tensor, known: torch.Tensor | None = None) -> torch.Tensor:
    """A host tensor that was to receive values: what is known, else nan, or 0 where its type has no nan."""
    if known is not None:
        return tensor.copy_(known)
    _warn()
    return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 0)


def to_host(tensor: torch.Tensor, kwargs: dict, known: torch.Tensor | None = None) -> torch.Tensor:
    """What `.cpu()` gives: real memory with stand-in values if it is small, else a host tensor without values."""
    dtype = kwargs.get("dtype") or tensor.dtype
    if known is not None:
        return known.to(dtype, copy=True)
    if tensor.numel() > STAND_IN_LIMIT:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    return forget(torch.zeros(tensor.shape, dtype=dtype))
