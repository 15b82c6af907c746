"""Unpickle a stranger's file without running anything in it.

A pickle is a program for a small stack machine. This is that machine without the instructions that import, call or
build objects: what is left makes dicts with string keys, lists, tuples, strings, integers, floats, bools and None, and
nothing else. Every other instruction is refused by name, and every count is bounded before memory is taken for it.

Source of the instruction set: the Python standard library, pickletools.opcodes.
"""

from __future__ import annotations

import gc
import pickletools
import struct
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}
_RUNS_CODE = {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "REDUCE", "BUILD", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4",
              "PERSID", "BINPERSID"}
_BYTES_EACH = 16  # a dict or list of a real snapshot takes 22 bytes and more
_SCALARS = frozenset((str, int, float, bool, type(None)))
_ZIP, _GZIP, _PROTO = b"PK\x03\x04", b"\x1f\x8b", b"\x80"


class SnapshotError(ValueError):
    """The file is not a memory snapshot that can be trusted, or not one at all. One line says why."""


class Limits(NamedTuple):
    """What is admitted. The defaults hold a history of a few million events."""

    file_bytes: int = 2**29
    containers: int = 8_000_000  # dicts, lists and tuples; fewer in a small file, see _BYTES_EACH
    stack: int = 100_000  # a pickler writes batches of 1,000: a taller stack is not from one
    marks: int = 100
    depth: int = 20
    text_bytes: int = 2**20  # of one string
    integer_bytes: int = 9  # an unsigned 64-bit address needs 9


DEFAULT = Limits()


def loads(data: bytes, limits: Limits = DEFAULT) -> object:
    """The object in a pickle of plain data, protocols 2 to 5. Raises SnapshotError for anything else."""
    _check_start(data, limits)
    collecting = gc.isenabled()
    gc.disable()  # nothing here is garbage before the end, and looking for it takes half of the time
    try:
        result = _Machine(data, limits).run()
    except (IndexError, struct.error):
        raise SnapshotError("corrupt pickle: it ends too soon, or takes what is not there") from None
    except UnicodeDecodeError:
        raise SnapshotError("corrupt pickle: a string is not UTF-8") from None
    finally:
        if collecting:
            gc.enable()
    _check_depth(result, limits.depth)
    return result


def _check_start(data: bytes, limits: Limits) -> None:
    if not data:
        raise SnapshotError("the file is empty")
    if len(data) > limits.file_bytes:
        raise SnapshotError(f"the file has {len(data):,} bytes; at most {limits.file_bytes:,} are read")
    if data.startswith(_ZIP):
        raise SnapshotError("a zip archive, as torch.save writes; a memory snapshot is a plain pickle")
    if data.startswith(_GZIP):
        raise SnapshotError("a gzip file: unpack it first")
    if not data.startswith(_PROTO):
        raise SnapshotError("not a pickle of protocol 2 or later, as torch.cuda.memory._dump_snapshot writes")


def _check_depth(root: object, depth: int) -> None:
    """Level by level, each container once: no recursion, and a container that holds itself ends too."""
    level, seen = [root], set()
    for _ in range(depth + 1):
        fresh = {id(c): c for c in level if id(c) not in seen}
        if not fresh:
            return
        seen.update(fresh)
        level = [child for c in fresh.values() for child in _children(c) if child.__class__ not in _SCALARS]
    if level:
        raise SnapshotError(f"containers nest more than {depth} deep; a memory snapshot has about 8 levels")


def _children(container: object) -> Iterable[object]:
    if isinstance(container, dict):
        return container.values()
    return container if isinstance(container, list | tuple) else ()


class _Machine:
    """The stack machine. `at` is the position in the data, for messages and for the rare instructions."""

    def __init__(self, data: bytes, limits: Limits):
        self.data, self.limits, self.at = data, limits, 0
        self.stack: list = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        self.containers = 0
        self.most = min(limits.containers, 10_000 + len(data) // _BYTES_EACH)
        self.rare = {code: getattr(self, f"op_{name.lower()}") for code, name in _NAMES.items()
                     if hasattr(self, f"op_{name.lower()}")}
        self.rare |= {0x4E: partial(self.stack.append, None), 0x88: partial(self.stack.append, True),
                      0x89: partial(self.stack.append, False)}  # NONE, NEWTRUE, NEWFALSE
        self.rare |= {0x84 + n: partial(self._tuple_of, n) for n in (1, 2, 3)}  # TUPLE1 to TUPLE3

    def run(self) -> object:
        """Execute up to STOP. The instructions that make up nearly all of a snapshot are spelt out here, for speed."""
        data, stack, memo, rare = self.data, self.stack, self.memo, self.rare
        push, tallest, at = stack.append, self.limits.stack, 0
        while len(stack) <= tallest:
            code = data[at]
            at += 1
            if code == 0x68:  # BINGET
                push(memo[data[at]] if data[at] in memo else self._unknown_memo(data[at]))
                at += 1
            elif code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x4B:  # BININT1
                push(data[at])
                at += 1
            elif code == 0x4D:  # BININT2
                push(data[at] | data[at + 1] << 8)
                at += 2
            elif code == 0x8A and data[at] <= 8:  # LONG1
                end = at + 1 + data[at]
                push(int.from_bytes(data[at + 1:end], "little", signed=True))
                at = end
            elif code == 0x6A:  # LONG_BINGET
                index = data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24
                push(memo[index] if index in memo else self._unknown_memo(index))
                at += 4
            elif code == 0x2E:  # STOP
                return self._stop(at)
            else:
                handler = rare.get(code)
                if handler is None:
                    self._refuse(code, at - 1)
                self.at = at
                handler()
                at = self.at
        raise SnapshotError(f"more than {tallest:,} values wait on the stack; no pickler writes that")

    def _stop(self, at: int) -> object:
        if at != len(self.data):
            raise SnapshotError(f"{len(self.data) - at:,} bytes follow the end of the pickle")
        if len(self.stack) != 1 or self.marks:
            raise SnapshotError("corrupt pickle: more than one value is left at its end")
        return self.stack[0]

    def _refuse(self, code: int, at: int) -> None:
        name = _NAMES.get(code)
        if name is None:
            raise SnapshotError(f"corrupt pickle: no instruction has the code {code} (byte {at:,})")
        if name in _RUNS_CODE:
            raise SnapshotError(f"refused {name}{self._named(name, at)} at byte {at:,}: it imports or calls code, "
                                "and a memory snapshot holds only plain data")
        raise SnapshotError(f"refused {name} at byte {at:,}: a memory snapshot holds only dicts, lists, tuples, "
                            "strings, numbers, booleans and None")

    def _named(self, name: str, at: int) -> str:
        """What would have been imported, where the pickle says it at this place."""
        if name == "STACK_GLOBAL":
            words = [str(word)[:40] for word in self.stack[-2:] if isinstance(word, str)]
        elif name in ("GLOBAL", "INST"):
            words = [w.decode("ascii", "replace")[:40] for w in self.data[at + 1:at + 200].split(b"\n")[:2]]
        else:
            words = []
        return f" of {'.'.join(words)!r}" if words else ""

    def _unknown_memo(self, index: int) -> None:
        raise SnapshotError(f"corrupt pickle: it refers to value {index} before it has one")

    # Reading the data

    def _take(self, count: int) -> bytes:
        """The next `count` bytes; never more than the file has."""
        start = self.at
        if count > len(self.data) - start:
            left = len(self.data) - start
            raise SnapshotError(f"truncated: byte {start:,} announces {count:,} more, {left:,} follow")
        self.at = start + count
        return self.data[start:self.at]

    def _number(self, layout: str, width: int) -> int | float:
        return struct.unpack(layout, self._take(width))[0]

    def _text(self, length: int) -> None:
        if length > self.limits.text_bytes:
            raise SnapshotError(f"a string of {length:,} bytes is announced, longer than {self.limits.text_bytes:,}")
        self.stack.append(str(self._take(length), "utf-8", "surrogatepass"))

    # Instructions: op_ and their names in pickletools. What is neither here nor in `rare` above is refused.

    def op_proto(self) -> None:
        version = self._take(1)[0]
        if not 2 <= version <= 5:
            raise SnapshotError(f"pickle protocol {version} does not exist, or is older than memory snapshots are")

    def op_frame(self) -> None:
        self._number("<Q", 8)  # how the pickler batched its writes: means nothing here

    def op_binint(self) -> None:
        self.stack.append(self._number("<i", 4))

    def op_binfloat(self) -> None:
        self.stack.append(self._number(">d", 8))

    def op_long1(self) -> None:
        length = self._take(1)[0]
        if length > self.limits.integer_bytes:
            raise SnapshotError(f"an integer of {length} bytes is announced; no address or size has more than 9")
        self.stack.append(int.from_bytes(self._take(length), "little", signed=True))

    def op_short_binunicode(self) -> None:
        self._text(self._take(1)[0])

    def op_binunicode(self) -> None:
        self._text(self._number("<I", 4))

    def op_binunicode8(self) -> None:
        self._text(self._number("<Q", 8))

    def op_binput(self) -> None:
        self.memo[self._take(1)[0]] = self.stack[-1]

    def op_long_binput(self) -> None:
        self.memo[self._number("<I", 4)] = self.stack[-1]

    def op_mark(self) -> None:
        if len(self.marks) >= self.limits.marks:
            raise SnapshotError(f"more than {self.limits.marks} containers are open at once: nested too deep")
        self.marks.append(len(self.stack))

    def _container(self, value: object) -> None:
        self.containers += 1
        if self.containers > self.most:
            raise SnapshotError(f"more than {self.most:,} containers in {len(self.data):,} bytes: no memory snapshot")
        self.stack.append(value)

    def op_empty_dict(self) -> None:
        self._container({})

    def op_empty_list(self) -> None:
        self._container([])

    def op_empty_tuple(self) -> None:
        self._container(())

    def _since_mark(self) -> list:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def _pop(self, count: int) -> list:
        if len(self.stack) < count:
            raise IndexError
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def op_tuple(self) -> None:
        self._container(tuple(self._since_mark()))

    def _tuple_of(self, count: int) -> None:
        self._container(tuple(self._pop(count)))

    def op_list(self) -> None:
        self._container(self._since_mark())

    def op_dict(self) -> None:
        items = self._since_mark()
        self._container({})
        self._set(items)

    def op_append(self) -> None:
        self._extend(self._pop(1))

    def op_appends(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list) -> None:
        if self.stack[-1].__class__ is not list:
            raise SnapshotError("corrupt pickle: it appends to what is not a list")
        self.stack[-1].extend(items)

    def op_setitem(self) -> None:
        self._set(self._pop(2))

    def op_setitems(self) -> None:
        self._set(self._since_mark())

    def _set(self, items: list) -> None:
        target, keys = self.stack[-1], items[::2]
        if target.__class__ is not dict or len(items) % 2:
            raise SnapshotError("corrupt pickle: it sets items of what is not a dict, or a key without a value")
        if others := {*map(type, keys)} - {str}:
            raise SnapshotError(f"refused a {others.pop().__name__} as key: the keys of a memory snapshot are strings")
        target.update(zip(keys, items[1::2], strict=True))
