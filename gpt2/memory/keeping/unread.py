"""Where a `del` could stand: from which statement on a name is not read again before it gets a new value.

Decided on the bytecode, along every path; what exceptions do is left out.
"""

from __future__ import annotations

import ast
import dis
import linecache
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_ALWAYS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"}


class Statement(NamedTuple):
    """Lines first to last of a file; of a compound statement only its head."""

    first: int
    last: int


def statement(file: str, line: int) -> Statement:
    """The innermost statement that this line belongs to; the line alone where there is no source."""
    found = [s for s in _statements(file) if s.first <= line <= s.last]
    return min(found, key=lambda s: (s.last - s.first, -s.first), default=Statement(line, line))


def is_unread(code: CodeType, where: Statement, name: str) -> bool:
    """Whether `name` is not read any more from the beginning of a statement of `code` on.

    A name that a function defined inside may read counts as read.
    """
    if any(name in (*inner.co_names, *inner.co_freevars) for inner in _inside(code)):
        return False
    steps = _instructions(code)
    inside = [i for i, step in enumerate(steps) if where.first <= (step.positions.lineno or 0) <= where.last]
    return bool(inside) and not _reads(steps, inside[0], name)


def _reads(steps: list[dis.Instruction], start: int, name: str) -> bool:
    """Whether any path from `start` reads the name before it is bound anew or deleted."""
    at = {step.offset: i for i, step in enumerate(steps)}
    seen, waiting = set(), [start]
    while waiting:
        i = waiting.pop()
        while i < len(steps) and i not in seen:
            seen.add(i)
            step = steps[i]
            what = _does(step, name)
            if what == "read":
                return True
            if what or step.opname in _ENDS:
                break
            if step.opcode in _JUMPS:
                waiting.append(at[step.argval])
                if step.opname in _ALWAYS:
                    break
            i += 1
    return False


def _does(step: dis.Instruction, name: str) -> str:
    """"read", "bound" (or deleted) or "". Newer Pythons do two names in one instruction, in the order of its name."""
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    if name not in names:
        return ""
    verbs = [v for v in step.opname.split("_") if v in ("LOAD", "STORE", "DELETE")]
    if step.opname.endswith(("_ATTR", "_METHOD", "_CONST")) or not verbs:
        return ""
    for verb, each in zip(verbs if len(verbs) == len(names) else verbs * len(names), names, strict=False):
        if each == name:
            return "read" if verb == "LOAD" else "bound"
    return ""


_JUMPS = {*dis.hasjrel, *dis.hasjabs}


@lru_cache(maxsize=256)
def _instructions(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


def _inside(code: CodeType):
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inside(constant)


@lru_cache(maxsize=64)
def _statements(file: str) -> tuple[Statement, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(Statement(node.lineno, _last(node)) for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _last(node: ast.stmt) -> int:
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    first = body[0] if body else None
    if first is None:
        return node.end_lineno
    return max(node.lineno, getattr(first, "lineno", node.end_lineno + 1) - 1)
