"""What letting go earlier would save: where a `del` could stand, and the run with it, found by replaying the trace.

A group of names that alone hold some blocks is one edit of the program. It acts wherever its line is reached, in every
step and layer; a block that autograd has saved as well goes when backward has passed there, which one more run tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple

from gpt2.memory.caching.out_of_memory import format_size
from gpt2.memory.keeping.holders import Held, Name, Saver, has_let_go, savers, short
from gpt2.memory.keeping.rerun import Program, again
from gpt2.memory.keeping.unread import Statement, is_unread, statement
from gpt2.memory.replay import Replay, edited, replay
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.trace import Block, Frame, Trace

LARGE = 2**20  # bytes: smaller blocks are not listed


@dataclass(frozen=True)
class Release:
    """A `del` that could stand in the program, and the peaks of the run with it."""

    names: tuple[str, ...]
    places: tuple[tuple[str, int, str], ...]  # file, line before which the `del` stands, function
    held_bytes: int  # what these names alone hold at the event that was looked at
    blocks: int  # how many blocks of the run go earlier
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    saved_allocated_bytes: int
    saved_reserved_bytes: int

    def text(self) -> str:
        """For people."""
        lines: dict[tuple[str, int, str], list[str]] = {}
        for name, place in zip(self.names, self.places, strict=True):
            lines.setdefault(place, []).append(name)
        where = [f"`del {', '.join(dict.fromkeys(names))}` before {short(file)}:{line}, in {function}"
                 for (file, line, function), names in sorted(lines.items(), key=lambda item: item[0])]
        return (f"{' and '.join(where)}: frees {format_size(self.held_bytes)} here; "
                f"peak {_change(self.saved_allocated_bytes)}, reserved {_change(self.saved_reserved_bytes)}")


def _change(saved: int) -> str:
    return "as before" if not saved else f"{'down' if saved > 0 else 'up'} {format_size(abs(saved))}"


class _Spot(NamedTuple):
    """Where a `del` could stand: before a statement of a frame."""

    name: str
    code: CodeType
    before: Statement


def releases(trace: Trace, event: int, blocks: list[Block], alive: dict[int, int], held: dict[int, Held],
              program: Program, card: Callable[[], SimulatedGpu]) -> list[Release]:
    """What names alone hold is grouped by where they could be deleted; each group is one edit of the program."""
    groups: dict[tuple[_Spot, ...], list[int]] = {}
    stands = _Stands(trace.stacks)
    for address, found in held.items():
        n = alive.get(address)
        if n is None or blocks[n].event.category or found.saved or found.operand or not found.names:
            continue
        spots = [_spot(trace, stands, blocks[n], event, name) for name in found.names]
        if all(spots):
            groups.setdefault(tuple(dict.fromkeys(spots)), []).append(n)
    groups = {spots: members for spots, members in groups.items()
              if sum(blocks[n].event.block_bytes for n in members) > LARGE}
    if not groups:
        return []
    plans = [_everywhere(trace, stands, blocks, spots, members) for spots, members in groups.items()]
    free_after = _free_after(program, card(), trace, blocks, {n: at for plan in plans for n, at in plan.items()})
    before, found = _replay(trace), []
    for (spots, members), plan in zip(groups.items(), plans, strict=True):
        free_earlier = {n: free_after[n] for n in plan if n in free_after}
        if set(members) <= set(free_earlier):
            found.append(_release(trace, blocks, spots, members, free_earlier, before))
    return sorted(found, key=lambda r: (-r.saved_allocated_bytes, -r.saved_reserved_bytes, -r.held_bytes))


def _spot(trace: Trace, stands: _Stands, block: Block, event: int, name: Name) -> _Spot | None:
    """Before which statement the name could be deleted, the earliest; None if it is read after all."""
    if not name.editable or name.code is None:
        return None
    standing = stands[name.code]
    born, found = standing[block.event.stack], None
    for i in range(event, block.born, -1):
        e = trace.events[i]
        if e.action == "alloc":
            where = standing[e.stack]
            if where is None or where == born or found != where and not is_unread(name.code, where, name.name):
                break  # before this the frame did not run, or the name had no value, or it was read
            found = where
    return None if found is None else _Spot(name.name, name.code, found)


class _Stands(dict):
    """Code -> for each stack of a trace the statement at which a frame of that code stands in it, or None."""

    def __init__(self, stacks: list[tuple[Frame, ...]]):
        super().__init__()
        self.stacks = stacks

    def __missing__(self, code: CodeType) -> list[Statement | None]:
        lines = {line for _, _, line in code.co_lines() if line}
        found = []
        for stack in self.stacks:
            line = next((f.line for f in stack if f.name == code.co_name and f.file == code.co_filename
                         and min(lines) <= f.line <= max(lines)), None)
            found.append(None if line is None else statement(code.co_filename, line))
        self[code] = found
        return found


def _everywhere(trace: Trace, stands: _Stands, blocks: list[Block], spots: tuple[_Spot, ...],
                members: list[int]) -> dict[int, int]:
    """Each block that the edit lets go, in every step and layer -> the event with which the last spot is reached.

    It is the block that the same statement makes as the same of its allocations.
    """
    stack = blocks[members[0]].event.stack
    standing = stands[next((s.code for s in spots if stands[s.code][stack]), spots[0].code)]
    births, number, last = [], 0, None
    for block in blocks:
        here = standing[block.event.stack] or block.event.stack
        number = 0 if here != last else number + (not block.event.category)
        last = here
        births.append((here, number))
    same, plan = {births[n] for n in members}, {}
    for n, block in enumerate(blocks):
        if births[n] in same and not block.event.category:
            reached = [_reaches(trace, stands[spot.code], block, spot) for spot in spots]
            if all(reached):
                plan[n] = max(reached)
    return plan


def _reaches(trace: Trace, standing: list[Statement | None], block: Block, spot: _Spot) -> int:
    """The first event after a block's birth at which the statement is running; 0 if none is before its end."""
    for i in range(block.born + 1, len(trace) if block.died is None else block.died + 1):
        e = trace.events[i]
        if e.action == "alloc" and standing[e.stack] == spot.before:
            return i
    return 0


def _free_after(program: Program, card: SimulatedGpu, trace: Trace, blocks: list[Block],
                plan: dict[int, int]) -> dict[int, int]:
    """The event after which each block of the plan would be gone if its names were: at once, or, if autograd has saved
    it too, when backward has passed there. Blocks for which that is never, or at their recorded end, are left out."""
    found: dict[int, int] = {}
    starts: dict[int, list[int]] = {}
    for n, reached in plan.items():
        starts.setdefault(reached, []).append(n)
    waiting: dict[int, list[Saver]] = {}

    def each(i: int) -> None:
        for n in [n for n, nodes in waiting.items() if all(map(has_let_go, nodes))]:
            del waiting[n]
            found[n] = i - 1
        if i in starts:
            nodes = savers(card)
            for n in starts[i]:
                if mine := nodes.get(blocks[n].event.address):
                    waiting[n] = mine
                else:
                    found[n] = i - 1

    again(program, card, trace, len(trace) - 1, each)
    return {n: i for n, i in found.items() if blocks[n].died is None or i < blocks[n].died}


def _release(trace: Trace, blocks: list[Block], spots: tuple[_Spot, ...], members: list[int],
             free_earlier: dict[int, int], before: Replay) -> Release:
    after = _replay(edited(trace, free_earlier))
    return Release(
        tuple(s.name for s in spots), tuple((s.code.co_filename, s.before.first, s.code.co_qualname) for s in spots),
        sum(blocks[n].event.block_bytes for n in members), len(free_earlier),
        after.peak_allocated_bytes, after.peak_reserved_bytes,
        before.peak_allocated_bytes - after.peak_allocated_bytes,
        before.peak_reserved_bytes - after.peak_reserved_bytes)


def _replay(trace: Trace) -> Replay:
    return replay(trace, allocator_conf=trace.meta["allocator_conf"], torch=trace.meta["torch"])
