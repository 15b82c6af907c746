"""Who holds each block at this very moment of a simulated run: autograd's nodes, names, containers.

Looked at from inside the run, while an allocation is being made: nothing is copied, no value is read, and what is
returned holds no tensor. Autograd's graph is walked from every tensor that Python knows; a name is a local or global
variable of a frame that is running, and what leads from it to the tensor: an attribute, a list, a closure.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import NamedTuple

import torch

_HERE = str(Path(__file__).parents[1])
_STUDY = str(Path(__file__).parents[2] / "cli")
_LIBRARIES = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), "<frozen", _STUDY, _HERE)
_DEEPEST = 6  # containers between a tensor and its name
_ENDS = (torch.nn.Module, ModuleType, FrameType, type)  # what contains these says no more


class Name(NamedTuple):
    """A name that leads to a tensor."""

    name: str  # the variable
    path: str  # what is written to reach the tensor: "logits", "out.logits", "kept[3]"
    function: str
    file: str
    line: int  # where its frame stands
    code: CodeType | None  # None if no frame that runs has it: a global of a module, a closure, a traceback
    editable: bool  # in the user's own code, in a frame that runs

    def text(self) -> str:
        """For people."""
        return f"{self.path} in {self.function} ({short(self.file)}{f':{self.line}' if self.line else ''})"


class Held(NamedTuple):
    """Who holds one block."""

    saved: tuple[str, ...]  # autograd nodes, with their modules
    names: tuple[Name, ...]
    operand: bool  # an argument of the operator that is running


def short(file: str) -> str:
    """The end of a path, from the package or the folder on."""
    parts = Path(file).parts
    for mark in ("site-packages", "dist-packages"):
        if mark in parts:
            return "/".join(parts[parts.index(mark) + 1:])
    return "/".join(parts[-2:] if file.startswith(str(Path(_HERE).parent)) else parts[-1:])


def look(card, wanted: set[int]) -> dict[int, Held]:
    """Address of each block of the card that a tensor has -> its holders. Call it while the run stands still.

    Names are looked for where `wanted` has the address; nodes everywhere.
    """
    gc.unfreeze()
    objects = gc.get_objects()  # taken first: nothing that is made here is in it
    live = card.tracker.live
    known: dict[int, list[torch.Tensor]] = {life.address: [] for life in live.values()}
    for o in objects:
        if issubclass(type(o), torch.Tensor) and (life := live.get(_key(o))) is not None:
            known[life.address].append(o)
    saved = savers(card, [tensor for group in known.values() for tensor in group])
    frames = _Frames()
    asked = {id(t): t for address, group in known.items()
             if address in wanted and address not in saved for t in group}
    names = frames.names(asked, objects)
    return {address: Held(tuple(sorted({_of(card, saver) for saver in saved.get(address, ())})),
                          tuple(sorted({n for t in group for n in names.get(id(t), ())}, key=lambda n: n[:5])),
                          any(id(t) in frames.operands for t in group))
            for address, group in known.items()}


def _key(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # has no storage: sparse, functional
        return 0


# --- autograd -------------------------------------------------------------------------------------------------------


Saver = tuple[object, str]  # a node, and the attribute under which it keeps the tensor


def savers(card, tensors: list[torch.Tensor] | None = None) -> dict[int, list[Saver]]:
    """Address -> the nodes that keep it for backward; walked from `tensors` (default: all there are)."""
    live, found = card.tracker.live, defaultdict(list)
    if tensors is None:
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and _key(o) in live]
    current = torch._C._current_autograd_node()
    waiting = [t.grad_fn for t in tensors if t.grad_fn is not None] + ([current] if current is not None else [])
    seen: dict[int, object] = {}
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            waiting += [following for following, _ in node.next_functions if following is not None]
            for attribute in dir(type(node)):
                for tensor in _kept(node, attribute) if attribute.startswith("_raw_saved_") else ():
                    if (life := live.get(_key(tensor))) is not None:
                        found[life.address].append((node, attribute))
    return found


def has_let_go(saver: Saver) -> bool:
    """Whether backward has passed this node."""
    return not _kept(*saver)


def _kept(node, attribute: str) -> list[torch.Tensor]:
    """What a node keeps, without asking hooks to unpack it: a checkpoint would run its forward."""
    try:
        raw = getattr(node, attribute)
        kept = [each.data for each in (raw if isinstance(raw, list | tuple) else (raw,))]
        return [tensor for tensor in kept if isinstance(tensor, torch.Tensor)]
    except (RuntimeError, AttributeError):
        return []  # freed


def _of(card, saver: Saver) -> str:
    """The node's name, and the module whose forward made it."""
    node = saver[0]
    module = card.labels._module_of_node.get(node._sequence_nr(), "") if hasattr(node, "_sequence_nr") else ""
    return f"{node.name()} of {module}" if module else node.name()


# --- names ----------------------------------------------------------------------------------------------------------


class _Frames:
    """The frames that run, and what their names hold."""

    def __init__(self):
        self.roots: dict[int, list[Name]] = defaultdict(list)
        self.operands: set[int] = set()
        self.passed: set[int] = set()  # frames that run, and their tables of variables: their names are roots
        frame = sys._getframe(1)
        while frame is not None:
            self._enter(frame)
            frame = frame.f_back

    def _enter(self, frame: FrameType) -> None:
        code, values = frame.f_code, frame.f_locals
        self.passed |= {id(frame), id(values)}
        if code.co_flags & inspect.CO_OPTIMIZED and type(values) is dict:
            values, copy = dict(values), values
            copy.clear()  # before Python 3.13 this copy would keep what the frame itself lets go
        if code.co_filename.startswith(_HERE):
            if code.co_filename.endswith("dispatch.py"):
                self.operands |= {id(inner) for value in values.values() for inner in _flat(value)}
            return
        editable = not is_library(code.co_filename)
        for name, value in list(values.items()):
            if not name.startswith("__"):
                self.roots[id(value)].append(Name(
                    name, name, code.co_qualname, code.co_filename, frame.f_lineno, code, editable))

    def names(self, wanted: dict[int, object], objects: list) -> dict[int, list[Name]]:
        """The names of each wanted object, directly or through what contains it. `objects`: where to look for that."""
        above: dict[int, list[tuple[object, str]]] = {}
        level = wanted
        for _ in range(_DEEPEST):
            parents: dict[int, list[tuple[object, str]]] = {key: [] for key in level}
            for o in objects if level else ():
                if id(o) not in self.passed:
                    for inner in gc.get_referents(o):
                        if id(inner) in parents and (label := _label(o, inner)) is not None:
                            parents[id(inner)].append((o, label))
            above |= parents
            level = {id(o): o for group in parents.values() for o, _ in group
                     if id(o) not in self.roots and id(o) not in above and not isinstance(o, _ENDS)}
        return {key: self._up(key, above, "", 0) for key in wanted}

    def _up(self, key: int, above: dict, path: str, depth: int) -> list[Name]:
        found = [name._replace(path=name.name + path) for name in self.roots.get(key, ())]
        for parent, label in above.get(key, ()) if depth < _DEEPEST else ():
            longer = _joined(label, path)
            further = self._up(id(parent), above, longer, depth + 1)
            found += further or [_end(parent, longer)]
        return found


def _flat(value) -> list:
    if isinstance(value, list | tuple):
        return [inner for each in value for inner in _flat(each)]
    if isinstance(value, dict):
        return [inner for each in value.values() for inner in _flat(each)]
    return [value]


def is_library(file: str) -> bool:
    """Whether a file is not the user's own."""
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file


def _label(holder, inner) -> str | None:
    """How one gets from a holder to what it holds; None for a tensor, which holds no other."""
    if issubclass(type(holder), torch.Tensor):
        return None
    if isinstance(holder, dict):
        return next((f"[{key!r}]" for key, value in list(holder.items()) if value is inner), "")
    if isinstance(holder, list | tuple):
        return next((f"[{i}]" for i, value in enumerate(holder) if value is inner), "")
    if isinstance(holder, FrameType):
        return next((name for name, value in holder.f_locals.items() if value is inner), "")
    if isinstance(holder, FunctionType):
        cells = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=False)
        return next((name for name, cell in cells if cell is inner), "")
    attributes = getattr(holder, "__dict__", None)
    if attributes is inner:
        return "."  # an object's attributes are a dict; see `_joined`
    if not isinstance(attributes, dict) or isinstance(holder, type | ModuleType):
        return ""
    return next((f".{name}" for name, value in attributes.items() if value is inner), "")


def _joined(label: str, path: str) -> str:
    """`.` and `['out'][0]` are `.out[0]`."""
    return re.sub(r"^\['(\w+)'\]", r".\1", path) if label == "." else label + path


def _end(holder, path: str) -> Name:
    """The end of the way up without a name of a running frame: say what stands there."""
    if isinstance(holder, FrameType):
        code = holder.f_code
        return _nameless(f"a traceback or generator, by {path}", code.co_qualname, code.co_filename, holder.f_lineno)
    if isinstance(holder, FunctionType):
        return _nameless(f"a closure, by {path}", holder.__qualname__, holder.__code__.co_filename)
    kind = type(holder)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return _nameless(f"an object, by {kind.__qualname__}{path}", kind.__module__, file)


def _nameless(path: str, function: str, file: str, line: int = 0) -> Name:
    return Name("", path, function, file, line, None, False)
