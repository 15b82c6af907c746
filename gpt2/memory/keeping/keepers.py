"""Who keeps it alive: each large block at the peak of a run, and what an earlier `del` would save there.

    found = keepers(script, lambda: SimulatedGpu("A40", stacks=True))
    print(found.text())

The run is made once to find its peak, once more to look at that very event, and a third time to see whether a name was
the only holder already where a `del` could stand. What the `del` saves is found by replaying the first run with the
earlier free, in every activation of that line; the allocator's own reuse of blocks is in it. A program that does
something else the second time is noticed and refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gpt2.memory.caching.out_of_memory import format_size
from gpt2.memory.keeping.holders import Held, Name, look
from gpt2.memory.keeping.release import LARGE, Release, releases
from gpt2.memory.keeping.rerun import Program, again, run
from gpt2.memory.ledger import Ledger
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.trace import Block, Category, Event, Trace

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
    trace = run(program, card())
    if not any(e.action == "alloc" for e in trace.events):
        raise ValueError("nothing is allocated on the card, so nothing is kept")
    return trace


def at_event(trace: Trace, event: int, program: Program, card: Callable[[], SimulatedGpu]) -> Keepers:
    """What `keepers` finds at one event of a run that was made before."""
    held = _look_at(program, card(), trace, event)
    blocks = trace.blocks()
    alive = {b.event.address: n for n, b in enumerate(blocks)
             if b.born <= event and (b.died is None or b.died > event)}
    rows = _rows(trace, event, blocks, alive, held)
    edits = releases(trace, event, blocks, alive, held, program, card)
    return Keepers(trace, event, trace.allocated_bytes()[event], tuple(rows), tuple(edits))


def _look_at(program: Program, card: SimulatedGpu, trace: Trace, event: int) -> dict[int, Held]:
    """Who holds what at an event, in one more run."""
    found: dict[int, Held] = {}
    wanted = {b.event.address for b in trace.live_at(event) if not b.event.category}
    again(program, card, trace, event, lambda i: found.update(look(card, wanted)) if i == event else None)
    return found


# --- keepers --------------------------------------------------------------------------------------------------------


def _rows(trace: Trace, event: int, blocks: list[Block], alive: dict[int, int], held: dict[int, Held]) -> list[Kept]:
    categories = Ledger(trace).categories
    rows = []
    for address, n in alive.items():
        block = blocks[n].event
        if block.block_bytes > LARGE:
            kind, keeper = _keeper(block, blocks[n].born == event, held.get(address))
            made_by = " in ".join(filter(None, (block.operator, block.module)))
            rows.append(Kept(block.block_bytes, categories[n].value, made_by, kind, keeper))
    return sorted(rows, key=lambda row: -row.bytes)  # equal ones in the order of their birth


def _keeper(block: Event, is_new: bool, held: Held | None) -> tuple[str, str]:
    """(kind, keeper) of one block."""
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
        return "engine", "an operand of the operator that runs"
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
