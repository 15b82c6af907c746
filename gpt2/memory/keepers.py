"""Who keeps it alive: each large block at the peak of a run, and what an earlier `del` would save there.

    found = keepers(script, lambda: SimulatedGpu("A40", stacks=True))
    print(found.text())

The run is made once to find its peak, once more to look at that very event, and a third time to see whether a name was
the only holder already where a `del` could stand. What the `del` saves is found by replaying the first run with the
earlier free, in every activation of that line; the allocator's own reuse of blocks is in it. A program that does
something else the second time is noticed and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gpt2.memory.holders import Held, Name, look, short
from gpt2.memory.ledger import Ledger
from gpt2.memory.out_of_memory import format_size
from gpt2.memory.replay import edited, replay
from gpt2.memory.simulator import SimulatedGpu, collect_garbage
from gpt2.memory.trace import Block, Category, Event, Trace
from gpt2.memory.unread import Statement, is_unread, statement

LARGE = 2**20  # bytes: smaller blocks are not listed
Program = Callable[[SimulatedGpu], object]
_CLAIMED = {
    Category.PARAMETERS.value: "parameter {} of the model",
    Category.GRADIENTS.value: "gradient of {}",
    Category.INPUTS.value: "buffer {} of the model",
    Category.WORKSPACE.value: "{}",
}


class Kept(NamedTuple):
    """A block at the peak and its keeper."""

    bytes: int
    category: str  # of the ledger
    made_by: str  # operator and module
    kind: str  # "saved for backward" | "name" | "container" | "parameters" | "optimizer" | "library" | "engine"
    keeper: str


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
        where = [f"`del {name}` before {short(file)}:{line}, in {function}"
                 for name, (file, line, function) in zip(self.names, self.places, strict=True)]
        return (f"{' and '.join(where)}: frees {format_size(self.held_bytes)} here; the peak falls by "
                f"{format_size(self.saved_allocated_bytes)}, reserved by {format_size(self.saved_reserved_bytes)}")


@dataclass(frozen=True)
class Keepers:
    """What was found at `event` of `trace`. Rows largest first; releases most helpful first."""

    trace: Trace
    event: int
    allocated_bytes: int
    rows: tuple[Kept, ...]
    releases: tuple[Release, ...]

    def text(self, at_most: int = 12) -> str:
        """For people: equal rows together."""
        event = self.trace.events[self.event]
        lines = [f"What keeps {format_size(self.allocated_bytes)} alive in step {event.step} ({event.phase}), "
                 f"blocks above {format_size(LARGE)}"]
        groups = self.grouped()
        for kind, keeper, count, size in groups[:at_most]:
            lines.append(f"  {format_size(size):>12}  {count:>4} blocks  {kind}: {keeper}")
        if rest := groups[at_most:]:
            lines.append(f"  {format_size(sum(g[3] for g in rest)):>12}  {sum(g[2] for g in rest):>4} blocks  "
                         f"of {len(rest)} more keepers")
        lines += ["", "What only names hold, and what letting go earlier would save"] if self.releases else []
        return "\n".join([*lines, *(f"  {release.text()}" for release in self.releases)])

    def grouped(self) -> list[tuple[str, str, int, int]]:
        """(kind, keeper, blocks, bytes), largest first; the numbers of a model's layers do not tell keepers apart."""
        sums: dict[tuple[str, str], list[int]] = {}
        for row in self.rows:
            entry = sums.setdefault((row.kind, _without_numbers(row.keeper)), [0, 0])
            entry[0] += 1
            entry[1] += row.bytes
        return sorted(((*key, *entry) for key, entry in sums.items()), key=lambda g: -g[3])


def keepers(program: Program, card: Callable[[], SimulatedGpu], event: int | None = None) -> Keepers:
    """Run `program(card)` on fresh cards and name what keeps each large block at an event (default: the peak) alive.

    `card()` makes a SimulatedGpu with `stacks=True`. Running out of memory ends a run, and is no error. Raises
    ValueError if nothing is allocated, or if the program takes another course the second time.
    """
    trace = first_run(program, card)
    return at_event(trace, trace.peak() if event is None else event, program, card)


def first_run(program: Program, card: Callable[[], SimulatedGpu]) -> Trace:
    """The whole run, with stacks."""
    trace = _run(program, card(), {})
    if not any(e.action == "alloc" for e in trace.events):
        raise ValueError("nothing is allocated on the card, so nothing is kept")
    return trace


def at_event(trace: Trace, event: int, program: Program, card: Callable[[], SimulatedGpu]) -> Keepers:
    """What `keepers` finds at one event of a run that was made before."""
    held = _look_at(program, card, trace, [event])[event]
    blocks = trace.blocks()
    alive = {b.event.address: n for n, b in enumerate(blocks)
             if b.born <= event and (b.died is None or b.died > event)}
    rows = _rows(trace, event, blocks, alive, held)
    releases = _releases(trace, event, blocks, alive, held, program, card)
    return Keepers(trace, event, trace.allocated_bytes()[event], tuple(rows), tuple(releases))


# --- running --------------------------------------------------------------------------------------------------------


class _Seen(BaseException):
    """Ends a run: what was to be seen has been seen."""


def _run(program: Program, card: SimulatedGpu, stops: dict[int, Callable[[], None]]) -> Trace:
    collect_garbage()
    record, events = card.allocator.record, card.events

    def watched(*event) -> None:
        record(*event)
        if (stop := stops.get(len(events) - 1)) is not None:
            stop()

    card.allocator.record = watched
    try:
        with card:
            kept = program(card)
            trace = card.trace()
            del kept
            return trace
    except (_Seen, torch.OutOfMemoryError):
        return card.trace()


def _look_at(program: Program, card: Callable[[], SimulatedGpu], trace: Trace,
             events: Iterable[int]) -> dict[int, dict[int, Held]]:
    """Who holds what at each of these events, in one more run that ends at the last of them."""
    found: dict[int, dict[int, Held]] = {}
    watched, last, blocks = card(), max(events), trace.blocks()
    wanted = {event: {b.event.address for b in blocks if not b.event.category and b.born <= event
                      and (b.died is None or b.died > event)} for event in events}

    def stop(event: int) -> None:
        now, then = watched.events[event], trace.events[event]
        if (now.action, now.requested_bytes, now.address) != (then.action, then.requested_bytes, then.address):
            raise ValueError(f"the program took another course the second time: event {event} was "
                             f"{then.action} of {then.requested_bytes} B, and is {now.action} of {now.requested_bytes}")
        found[event] = look(watched, wanted[event])
        if event == last:
            raise _Seen

    _run(program, watched, {event: lambda event=event: stop(event) for event in events})
    if last not in found:
        raise ValueError(f"the program took another course the second time: it ended before event {last}")
    return found


# --- keepers --------------------------------------------------------------------------------------------------------


def _rows(trace: Trace, event: int, blocks: list[Block], alive: dict[int, int], held: dict[int, Held]) -> list[Kept]:
    categories = Ledger(trace).categories
    rows = []
    for address, n in alive.items():
        block = blocks[n].event
        if block.block_bytes > LARGE:
            kind, keeper = _keeper(block, blocks[n].born == event, held.get(address), trace.events[event].operator)
            made_by = " in ".join(filter(None, (block.operator, block.module)))
            rows.append(Kept(block.block_bytes, categories[n].value, made_by, kind, keeper))
    return sorted(rows, key=lambda row: (-row.bytes, row.kind, row.keeper))


def _keeper(block: Event, is_new: bool, held: Held | None, running: str) -> tuple[str, str]:
    """(kind, keeper) of one block; `running` is the operator that is at work."""
    if is_new:
        return "engine", f"{block.operator}, which is making it"
    if block.category == Category.OPTIMIZER.value:
        name, _, key = block.module.rpartition(":")
        return "optimizer", f"{key} of {name}"
    if block.category in _CLAIMED:
        kind = "library" if block.category == Category.WORKSPACE.value else "parameters"
        what = block.operator if kind == "library" else block.module
        return kind, _CLAIMED[block.category].format(what)
    if held is None:
        return "library", f"scratch of {block.operator}"
    if held.saved:
        return "saved for backward", " and ".join(held.saved)
    if held.operand and not any(name.editable for name in held.names):
        return "engine", f"an operand of {running}, which runs"
    if held.names:
        kind = "name" if any(name.path == name.name for name in held.names) else "container"
        return kind, " and ".join(dict.fromkeys(name.text() for name in _shortest(held.names)))
    return "engine", f"autograd's own, between two nodes, made by {block.operator}"


def _shortest(names: tuple[Name, ...]) -> list[Name]:
    """The user's own names if there are any, direct ones before ways through containers; at most two."""
    ranked = sorted(names, key=lambda n: (not n.editable, n.code is None, len(n.path)))
    return [n for n in ranked if n.editable == ranked[0].editable][:2]


def _without_numbers(keeper: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in keeper.split("."))


# --- letting go -----------------------------------------------------------------------------------------------------


class _Spot(NamedTuple):
    """Where a `del` could stand: before a statement of a frame. Reached first by event `reached` of the trace."""

    name: str
    file: str
    function: str
    before: Statement
    reached: int


def _releases(trace: Trace, event: int, blocks: list[Block], alive: dict[int, int], held: dict[int, Held],
              program: Program, card: Callable[[], SimulatedGpu]) -> list[Release]:
    only_names = {alive[a]: h.names for a, h in held.items()
                  if a in alive and h.names and not h.saved and not h.operand and not blocks[alive[a]].event.category}
    choices: dict[int, list[tuple[_Spot, ...]]] = {}
    for n, names in only_names.items():
        spots = [_spots(trace, blocks[n], event, name) for name in names]
        if all(spots):
            choices[n] = [tuple(s[0] for s in spots), tuple(s[-1] for s in spots)]
    if not choices:
        return []
    looks = {max(s.reached for s in spots) for pair in choices.values() for spots in pair}
    seen = _look_at(program, card, trace, sorted(looks)) if looks else {}
    chosen: dict[tuple, list[int]] = {}
    for n, pair in choices.items():
        names = {name[:4] for name in only_names[n]}
        for spots in pair:
            then = seen[max(s.reached for s in spots)].get(blocks[n].event.address)
            if then and not then.saved and not then.operand and {name[:4] for name in then.names} <= names:
                chosen.setdefault(tuple(s[:4] for s in spots), []).append(n)
                break
    before = _replay(trace)
    found = [_release(trace, blocks, spots, members, before) for spots, members in chosen.items()]
    found = [release for release in found if release.held_bytes > LARGE]
    return sorted(found, key=lambda r: (-r.saved_allocated_bytes, -r.saved_reserved_bytes, -r.held_bytes))


def _spots(trace: Trace, block: Block, event: int, name: Name) -> list[_Spot]:
    """Statements before which the name could be deleted, earliest first; none if it is read after all."""
    if not name.editable or name.code is None:
        return []
    found: list[_Spot] = []
    for i in range(event, block.born, -1):
        e = trace.events[i]
        if e.action != "alloc":
            continue
        line = next((f.line for f in reversed(trace.stacks[e.stack]) if _is_in(f, name)), 0)
        if not line:
            break  # before this the frame did not run
        where = statement(name.file, line)
        if found and found[-1].before == where:
            found[-1] = found[-1]._replace(reached=i)
        elif is_unread(name.code, where, name.name):
            found.append(_Spot(name.name, name.file, name.function, where, i))
        else:
            break
    return found[::-1]


def _is_in(frame, name: Name) -> bool:
    return frame.file == name.file and name.function.rpartition(".")[2] == frame.name


def _release(trace: Trace, blocks: list[Block], spots: tuple, members: list[int], before) -> Release:
    """The run with the `del`, wherever its line is reached: in each step, each layer."""
    free_earlier = {}
    births = {blocks[n].event.stack for n in members}
    for n, block in enumerate(blocks):
        if block.event.stack in births and not block.event.category:
            reached = [_reaches(trace, block, spot) for spot in spots]
            if all(reached) and (block.died is None or max(reached) - 1 < block.died):
                free_earlier[n] = max(reached) - 1
    after = _replay(edited(trace, free_earlier))
    return Release(
        tuple(dict.fromkeys(s[0] for s in spots)), tuple(dict.fromkeys((s[1], s[3].first, s[2]) for s in spots)),
        sum(blocks[n].event.block_bytes for n in members), len(free_earlier),
        after.peak_allocated_bytes, after.peak_reserved_bytes,
        before.peak_allocated_bytes - after.peak_allocated_bytes, before.peak_reserved_bytes - after.peak_reserved_bytes)


def _reaches(trace: Trace, block: Block, spot: tuple) -> int:
    """The first event after a block's birth at which its line, in its function, is running; 0 if none is."""
    _, file, function, before = spot
    name = function.rpartition(".")[2]
    last = len(trace) if block.died is None else block.died + 1
    for i in range(block.born + 1, last):
        e = trace.events[i]
        if e.action == "alloc" and any(f.file == file and f.name == name and before.first <= f.line <= before.last
                                       for f in trace.stacks[e.stack]):
            return i
    return 0


def _replay(trace: Trace):
    return replay(trace, allocator_conf=trace.meta["allocator_conf"], torch=trace.meta["torch"])
