"""What a trace says, in tables: the peak and who owns it, step by step, growth, fragmentation. Bytes are integers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from gpt2.memory.caching.out_of_memory import format_size
from gpt2.memory.reading.history import BEFORE
from gpt2.memory.reading.layout import fragmentation
from gpt2.memory.trace import Block, Category, Frame, Trace

_LIBRARIES = ("/torch/", "site-packages", "dist-packages", "<frozen", "/lib/python")
_TORCH_FILES = ("module.py", "functional.py", "container.py", "_tensor.py", "checkpoint.py", "normalization.py",
                "linear.py", "activation.py", "sparse.py", "optimizer.py", "adam.py", "adamw.py", "_contextlib.py")
_UNKNOWN = "unknown"


def summary(trace: Trace, at_most: int = 20) -> dict:
    """Everything at once, ready for JSON. `at_most` limits the tables of owners.

    peak: event, step, phase, allocated_bytes, reserved_bytes, the request that set it and its owner; categories and
    owners of its bytes with their share_ratio, and known_share_ratio of all. steps: peak, end and growth of each.
    growth: who owns what stays from step to step. fragmentation: reserved, allocated, idle and largest free bytes
    at the peak of reserved memory, at the end, and at each failure. Raises ValueError for a trace without events.
    """
    if not trace.events:
        raise ValueError("the history is empty: nothing was recorded on this device")
    allocated, reserved = trace.allocated_bytes(), trace.reserved_bytes()
    peak = trace.peak()
    blocks = trace.blocks()
    at_peak = [b for b in blocks if b.born <= peak and (b.died is None or b.died > peak)]
    event, failures = trace.events[peak], [i for i, e in enumerate(trace.events) if e.action == "oom"]
    fullest = max(range(len(reserved)), key=lambda i: (reserved[i], -i))
    return {
        "kind": trace.meta.get("kind", ""), "gpu": trace.meta.get("gpu", ""), "torch": trace.meta.get("torch", ""),
        "events": len(trace), "warnings": list(trace.meta.get("warnings", [])),
        "peak": {"event": peak, "step": event.step, "phase": event.phase, "allocated_bytes": allocated[peak],
                 "reserved_bytes": reserved[peak], "requested_bytes": event.requested_bytes,
                 "owner": owner(trace, Block(peak, None, event))},
        "max_reserved_bytes": reserved[fullest],
        "categories": _shares(((b.event.category or _UNKNOWN, b) for b in at_peak), "category", len(Category) + 1),
        "owners": _shares(((owner(trace, b), b) for b in at_peak), "owner", at_most),
        "known_share_ratio": _known_share(trace, at_peak),
        "steps": _steps(trace, allocated),
        "growth": _growth(trace, blocks, at_most),
        "fragmentation": [{"moment": moment, **fragmentation(trace, i)} for moment, i in (
            ("most reserved", fullest), *(("out of memory", i) for i in failures[:5]), ("end", len(trace) - 1))],
        "failures": [{"event": i, "step": trace.events[i].step, "requested_bytes": trace.events[i].requested_bytes,
                      "free_device_bytes": trace.events[i].address} for i in failures[:100]],
    }


def owner(trace: Trace, block: Block) -> str:
    """Who asked for a block: module and operator where known, else the innermost frame that is not a library's and
    what it called; the backward and what is older than the recording have no stack."""
    event = block.event
    if event.module or event.operator:
        return " ".join(filter(None, (event.module, event.operator, f"({event.phase})" if event.phase else "")))
    if event.stack >= 0:
        return _place(trace.stacks[event.stack])
    if event.phase == BEFORE:
        return f"{BEFORE}: {event.category or _UNKNOWN}"
    return f"autograd: {event.category}" if event.phase == "backward" else _UNKNOWN


def _place(stack: tuple[Frame, ...]) -> str:
    """Recorded with stacks="all", a stack is full of C++: of that, only the name of a backward function says much."""
    python = [f for f in stack if f.file.endswith(".py") or f.file.startswith("<")]
    if not python:
        node = next(filter(None, (re.search(r"\w{1,80}Backward\w{0,9}", f.name[:500]) for f in stack)), None)
        return f"autograd: {node[0]}" if node else stack[-1].name[:80]
    own = next((i for i, f in enumerate(python) if not _library(f)), len(python) - 1)
    frame, called = python[own], python[0].name if own else ""
    file = frame.file.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{file}:{frame.line} {frame.name}" + (f" > {called}" if called and called != frame.name else "")


def _library(frame: Frame) -> bool:
    return any(part in frame.file for part in _LIBRARIES) or frame.file in _TORCH_FILES or frame.file.startswith("<")


def _shares(named: Iterable[tuple[str, Block]], column: str, at_most: int) -> list[dict]:
    sizes, counts = Counter(), Counter()
    for name, block in named:
        sizes[name] += block.event.block_bytes
        counts[name] += 1
    total = sum(sizes.values()) or 1
    return [{column: name, "bytes": size, "block_count": counts[name], "share_ratio": round(size / total, 6)}
            for name, size in sizes.most_common(at_most)]


def _known_share(trace: Trace, blocks: list[Block]) -> float:
    known = sum(b.event.block_bytes for b in blocks if _UNKNOWN not in owner(trace, b))
    return round(known / (sum(b.event.block_bytes for b in blocks) or 1), 6)


def _steps(trace: Trace, allocated: list[int]) -> list[dict]:
    """Peak and end of each step. An end is read before the next step's first allocation."""
    rows: dict[int, dict] = {}
    for event, now in zip(trace.events, allocated, strict=True):
        row = rows.setdefault(event.step, {"step": event.step, "peak_allocated_bytes": 0})
        row["peak_allocated_bytes"] = max(row["peak_allocated_bytes"], now)
        row["end_allocated_bytes"] = now
    steps, before = [row for step, row in sorted(rows.items()) if step > 0], None
    for row in steps:
        row["growth_bytes"] = 0 if before is None else row["end_allocated_bytes"] - before
        before = row["end_allocated_bytes"]
    return steps


def _growth(trace: Trace, blocks: list[Block], at_most: int) -> list[dict]:
    """Who owns what was made in a step, was there when the next one ended, and has a sibling in an earlier step.

    The first step makes what stays for good (optimizer state), the last one may not have ended: both are left out.
    """
    last = max((e.step for e in trace.events), default=0)
    staying = [b for b in blocks if 1 < b.event.step < last
               and (b.died is None or trace.events[b.died].step > b.event.step + 1)]
    return _shares(((owner(trace, b), b) for b in staying), "owner", at_most)


def text(table: dict) -> str:
    """The summary for people, sizes in MiB and GiB."""
    peak = table["peak"]
    card = ", ".join(filter(None, (table["gpu"], table["torch"] and f"torch {table['torch']}")))
    how = (" on " if table["kind"] == "measured" else " for ").join(filter(None, (table["kind"], card)))
    lines = [f"{table['events']:,} events ({how})", *(f"note: {w}" for w in table["warnings"]), "",
             f"Peak {format_size(peak['allocated_bytes'])} allocated, {format_size(peak['reserved_bytes'])} reserved, "
             f"in step {peak['step']} ({peak['phase'] or 'phase unknown'})",
             f"set by a request of {format_size(peak['requested_bytes'])} from {peak['owner']}",
             f"{table['known_share_ratio']:.1%} of its bytes have an owner", ""]
    for title, column in (("At the peak, by category", "category"), ("At the peak, by owner", "owner")):
        lines += [title, *_rows(table["categories" if column == "category" else "owners"], column), ""]
    lines += ["Step by step", *(f"  step {r['step']}: peak {format_size(r['peak_allocated_bytes'])}, end "
                                f"{format_size(r['end_allocated_bytes'])}, growth {r['growth_bytes']:+,} B"
                                for r in table["steps"][:20]), ""]
    if table["growth"]:
        lines += ["Stays from step to step", *_rows(table["growth"], "owner"), ""]
    lines += ["Fragmentation", *(
        f"  {f['moment']}: {format_size(f['reserved_bytes'])} reserved, {format_size(f['idle_bytes'])} idle, of which "
        f"the largest piece is {format_size(f['largest_free_bytes'])}" for f in table["fragmentation"])]
    return "\n".join(lines)


def _rows(rows: list[dict], column: str) -> list[str]:
    return [f"  {format_size(r['bytes']):>12}  {r['share_ratio']:6.1%}  {r['block_count']:>5} blocks  {r[column]}"
            for r in rows]
