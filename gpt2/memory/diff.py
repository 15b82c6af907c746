"""Two traces side by side: the first event in which they part, and what only one of them has.

Sizes and order are compared, addresses are not: a different address shows as a different peak later on. Frees that
follow each other without an allocation between them are compared as a set: autocast drops its cache in the order of a
hash table of pointers, which no two runs share, and what is free afterwards does not depend on it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from gpt2.memory.trace import Event, Trace


@dataclass(frozen=True)
class Difference:
    """`index` counts allocations and frees; None if the traces agree. `only_*`: (action, bytes) -> how many more."""

    index: int | None
    left: Trace
    right: Trace
    left_events: list[Event]
    right_events: list[Event]
    only_left: Counter
    only_right: Counter

    def text(self, context: int = 5) -> str:
        """The divergence in lines for people, with both stacks where there are any."""
        if self.index is None:
            return f"identical: {len(self.left_events):,} allocations and frees, same sizes, same order"
        lines = [f"first difference at allocation or free {self.index:,}"]
        for i in range(max(0, self.index - context), self.index + context + 1):
            sign = "=" if i < self.index else "!" if i == self.index else " "
            lines.append(f"{sign} {_line(self.left_events, i):70} | {_line(self.right_events, i)}")
        for name, trace, events in (("left", self.left, self.left_events), ("right", self.right, self.right_events)):
            if self.index < len(events) and (stack := events[self.index].stack) >= 0:
                lines += [f"{name} stack:", *(f"  {f.file}:{f.line} {f.name}" for f in trace.stacks[stack][:12])]
        for name, only in (("left", self.only_left), ("right", self.only_right)):
            lines += [f"only {name}: {count} x {action} {size:,} B" for (action, size), count in only.most_common(8)]
        return "\n".join(lines)


def _line(events: list[Event], i: int) -> str:
    if i >= len(events):
        return "(ended)"
    e = events[i]
    return f"{e.action:5} {e.requested_bytes:>13,} {e.step} {e.phase} {e.module} {e.operator} {list(e.shape) or ''}"


def memory_events(trace: Trace) -> list[Event]:
    """Allocations and frees only, up to an allocation that failed: what comes after is an exception's unwinding."""
    events = trace.events
    end = next((i for i, e in enumerate(events) if e.action == "oom"), len(events))
    return [e for e in events[:end] if e.action in ("alloc", "free", "free_requested")]


def _frees_in_order(events: list[Event]) -> list[Event]:
    """The same events, each run of frees sorted by size."""
    ordered: list[Event] = []
    for is_alloc, run in groupby(events, key=lambda e: e.action == "alloc"):
        ordered += sorted(run, key=lambda e: 0 if is_alloc else e.requested_bytes)  # noqa: B023 (used at once)
    return ordered


def compare(left: Trace, right: Trace) -> Difference:
    """Where two traces part."""
    a, b = _frees_in_order(memory_events(left)), _frees_in_order(memory_events(right))
    key_a, key_b = [(e.action, e.requested_bytes) for e in a], [(e.action, e.requested_bytes) for e in b]
    index = next((i for i, (x, y) in enumerate(zip(key_a, key_b, strict=False)) if x != y), None)
    if index is None and len(a) != len(b):
        index = min(len(a), len(b))
    count_a, count_b = Counter(key_a), Counter(key_b)
    return Difference(index, left, right, a, b, count_a - count_b, count_b - count_a)
