"""Who holds each block at this very moment of a simulated run: autograd's nodes, names, containers.

Looked at from inside the run, while an allocation is being made: nothing is copied, no value is read, and what is
returned holds no tensor. Autograd's graph is walked from every tensor that Python knows; a name is a local or global
variable of a frame that is running, and what leads from it to the tensor: an attribute, a list, a closure.
"""

from __future__ import annotations

import gc
import inspect
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import NamedTuple

import torch

_HERE = str(Path(__file__).parent)
_STUDY = str(Path(__file__).parents[1] / "cli")
_LIBRARIES = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), "<frozen", _STUDY, _HERE)
_DEEPEST = 6  # containers between a tensor and its name


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


def look(card) -> dict[int, Held]:
    """Address of each block of the card that a tensor has -> its holders. Call it while the run stands still."""
    live = card.tracker.live
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and _key(o) in live]
    saved = _saved(card, tensors)
    frames = _Frames()
    known: dict[int, list] = defaultdict(list)
    for tensor in tensors:
        known[live[_key(tensor)].address].append(tensor)
    names = frames.names({id(t): t for a, group in known.items() if a not in saved for t in group}, {id(tensors),
                         id(known), *map(id, known.values())})
    found = {}
    for address in {life.address for life in live.values()}:
        group = known.get(address, ())
        mine = {name for t in group for name in names.get(id(t), ())}
        found[address] = Held(tuple(sorted(saved.get(address, ()))), tuple(sorted(mine, key=lambda n: n[:5])),
                              any(id(t) in frames.operands for t in group))
    return found


def _key(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # has no storage: sparse, functional
        return 0


# --- autograd -------------------------------------------------------------------------------------------------------


def _saved(card, tensors: list[torch.Tensor]) -> dict[int, set[str]]:
    """Address -> the nodes that keep it for backward."""
    live, modules, found = card.tracker.live, card.labels._module_of_node, defaultdict(set)
    current = torch._C._current_autograd_node()
    waiting = [t.grad_fn for t in tensors if t.grad_fn is not None] + ([current] if current is not None else [])
    seen: dict[int, object] = {}
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        waiting += [following for following, _ in node.next_functions if following is not None]
        module = modules.get(node._sequence_nr(), "") if hasattr(node, "_sequence_nr") else ""
        for tensor in _tensors_of(node):
            if (life := live.get(_key(tensor))) is not None:
                found[life.address].add(f"{node.name()} of {module}" if module else node.name())
    return found


def _tensors_of(node) -> list[torch.Tensor]:
    """What a node saved, without asking hooks to unpack it: a checkpoint would run its forward again."""
    found: list = []
    for name in dir(type(node)):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            raw = getattr(node, name)
            for each in raw if isinstance(raw, list | tuple) else (raw,):
                found.append(each.data if each.unpack_hook is not None else each.unpack(node))
        except (RuntimeError, AttributeError, TypeError):
            pass  # freed: backward has passed here
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        found += [value for value in vars(node).values()]
    return [t for t in found if isinstance(t, torch.Tensor)]


# --- names ----------------------------------------------------------------------------------------------------------


class _Frames:
    """The frames that run, outermost first, and what their names hold."""

    def __init__(self):
        self.roots: dict[int, list[Name]] = defaultdict(list)
        self.operands: set[int] = set()
        self.tables: set[int] = set()  # dicts of variables: the names in them are roots
        self.mine: set[int] = set()
        chain: list[FrameType] = []
        frame = sys._getframe(1)
        while frame is not None:
            chain.append(frame)
            frame = frame.f_back
        self.running = {id(frame) for frame in chain}
        for frame in chain:
            self._enter(frame)

    def _enter(self, frame: FrameType) -> None:
        code, file = frame.f_code, frame.f_code.co_filename
        values = frame.f_locals
        if code.co_flags & inspect.CO_OPTIMIZED:
            kept = dict(values)
            if type(values) is dict:
                values.clear()  # before Python 3.13 this copy would keep what the frame itself lets go
            values = kept
        self.tables.add(id(values))
        if file.startswith(_HERE):
            if file.endswith("dispatch.py"):
                self.operands |= {id(v) for each in values.values() for v in _flat(each)}
            return
        function = code.co_qualname if hasattr(code, "co_qualname") else code.co_name
        for name, value in list(values.items()):
            if not name.startswith("__"):
                self.roots[id(value)].append(
                    Name(name, name, function, file, frame.f_lineno, code, not _is_library(file)))

    def names(self, wanted: dict[int, object], mine: set[int]) -> dict[int, list[Name]]:
        """The names of each wanted object, directly or through what contains it."""
        above: dict[int, list[tuple[object, str]]] = {}
        level, self.mine = dict(wanted), mine
        for _ in range(_DEEPEST):
            level = {key: o for key, o in level.items() if key not in above}
            if not level:
                break
            parents = self._parents(level)
            for key in level:
                above[key] = parents.get(key, [])
            level = {id(o): o for group in parents.values() for o, _ in group if id(o) not in self.roots}
        return {key: self._up(key, above, "", 0) for key in wanted}

    def _parents(self, level: dict[int, object]) -> dict[int, list[tuple[object, str]]]:
        found: dict[int, list[tuple[object, str]]] = defaultdict(list)
        for o in gc.get_objects():
            if id(o) in self.tables or id(o) in self.mine or o is level or o is found or id(o) in self.running:
                continue
            for inner in gc.get_referents(o):
                if id(inner) in level and (label := _label(o, inner)) is not None:
                    found[id(inner)].append((o, label))
        return found

    def _up(self, key: int, above: dict, path: str, depth: int) -> list[Name]:
        found = [name._replace(path=name.name + path) for name in self.roots.get(key, ())]
        for parent, label in above.get(key, ()) if depth < _DEEPEST else ():
            further = self._up(id(parent), above, label + path, depth + 1)
            found += further or [_nowhere(parent, label + path)]
        return found


def _flat(value) -> list:
    if isinstance(value, list | tuple):
        return [inner for each in value for inner in _flat(each)]
    if isinstance(value, dict):
        return [inner for each in value.values() for inner in _flat(each)]
    return [value]


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file


def _label(holder, inner) -> str | None:
    """How one gets from a holder to what it holds; None if the holder does not count."""
    if isinstance(holder, dict):
        return next((f"[{key!r}]" for key, value in list(holder.items()) if value is inner), "")
    if isinstance(holder, list | tuple):
        return next((f"[{i}]" for i, value in enumerate(holder) if value is inner), "")
    if isinstance(holder, CellType):
        return ""
    if isinstance(holder, FunctionType):
        for name, cell in zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=False):
            if cell is inner:
                return f" {name}"
        return ""
    if issubclass(type(holder), torch.Tensor) or isinstance(holder, FrameType | MethodType):
        return "" if isinstance(holder, FrameType) else None if not isinstance(holder, MethodType) else ""
    attribute = next((name for name, value in (getattr(holder, "__dict__", None) or {}).items() if value is inner), "")
    return f".{attribute}" if attribute else ""


def _nowhere(holder, path: str) -> Name:
    """The end of the way up without a name of a running frame: say what stands there."""
    if isinstance(holder, FrameType):
        code = holder.f_code
        return Name("", f"a traceback or generator, frame of{path}", code.co_qualname, code.co_filename,
                    holder.f_lineno, None, False)
    if isinstance(holder, FunctionType):
        return Name("", f"a closure:{path}", holder.__qualname__, holder.__code__.co_filename, 0, None, False)
    if isinstance(holder, ModuleType):
        return Name("", f"a global:{path}", holder.__name__, getattr(holder, "__file__", "") or "", 0, None, False)
    kind = type(holder)
    module = sys.modules.get(kind.__module__)
    return Name("", f"{kind.__qualname__}{path}", kind.__module__, getattr(module, "__file__", "") or "", 0, None, False)
