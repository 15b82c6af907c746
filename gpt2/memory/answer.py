"""The answer in a dict: does it fit, how much does it take, who asked for the most, whose are the bytes.

A function of a trace, real or simulated; the keys are those that `python -m gpt2 predict --json` promises.
"""

from __future__ import annotations

from gpt2.memory.trace import Category, Trace

_REQUEST = ("step", "phase", "module", "operator", "requested_bytes")


def answer(trace: Trace, *, whole_run: bool = False, owners: bool = True) -> dict:
    """What a trace says, ready for JSON; without `owners` the ledger is left out.

    Peaks, the request that set the peak and the ledger are those of the steps after the first, which alone is not
    representative. Where there is no later step (a run of one step), where the run ran out of memory (the step that
    died may not have come as far as those before it), and with `whole_run`, they are those of the whole run. Steps
    count from 1; `per_step` has what happened before the first one, as step 0, only if nothing else happened.
    """
    failure = trace.meta.get("out_of_memory")
    spans = _spans(trace)
    later = [begin for step, begin, _ in spans if step > 1]
    first = 0 if whole_run or failure is not None or not later else later[0]
    allocated, reserved = trace.allocated_bytes(), trace.reserved_bytes()
    peak = _highest(allocated, first, len(trace))
    return {
        "kind": trace.meta["kind"], "gpu": trace.meta["gpu"], "torch": trace.meta["torch"].partition("+")[0],
        "recipe": trace.meta.get("recipe"),
        "fits": failure is None,
        "peak_allocated_bytes": allocated[peak] if trace.events else 0,
        "peak_reserved_bytes": max(reserved[max(first - 1, 0):], default=0),
        "per_step": [{"step": step, "peak_allocated_bytes": allocated[_highest(allocated, begin, end)],
                      "peak_reserved_bytes": max(reserved[max(begin - 1, 0):end])} for step, begin, end in spans],
        "peak": request(trace.events[peak]._asdict()) if trace.events else None,
        "ledger": ledger(trace, peak) if owners else [],
        "out_of_memory": None if failure is None else request(failure),
    }


def request(fields: dict) -> dict:
    """Who asked for how much, of an event or of a failure."""
    return {key: fields.get(key, 0 if key in ("step", "requested_bytes") else "") for key in _REQUEST}


def _highest(allocated: list[int], first: int, end: int) -> int:
    """Index at which memory is first highest between two events; what was there before the first counts too."""
    return max(range(max(first - 1, 0), end), key=lambda i: (allocated[i], -i), default=0)


def _spans(trace: Trace) -> list[tuple[int, int, int]]:
    """(step, first event, event after the last) of each step from 1 on; of step 0 if there is no other. A step that
    only frees is none: it is what a loop does after its last one."""
    bounds: dict[int, list[int]] = {}
    asked = set()
    for i, event in enumerate(trace.events):
        bounds.setdefault(event.step, [i, i])[1] = i + 1
        if event.action in ("alloc", "oom"):
            asked.add(event.step)
    steps = [(step, first, end) for step, (first, end) in sorted(bounds.items()) if step in asked]
    return [span for span in steps if span[0] > 0] or steps


def ledger(trace: Trace, index: int) -> list[dict]:
    """Category and bytes of all that is allocated after an event, in the order of the enum; the sum is
    `memory_allocated()`. What blocks are larger than their requests is a category of its own, the slack."""
    from gpt2.memory.ledger import categorise  # brings pandas

    sizes = dict.fromkeys(Category, 0)
    for block, category in zip(trace.blocks(), categorise(trace), strict=True):
        if block.born <= index and (block.died is None or block.died > index):
            sizes[category] += block.event.requested_bytes
            sizes[Category.SLACK] += block.event.block_bytes - block.event.requested_bytes
    return [{"category": category.value, "bytes": size} for category, size in sizes.items() if size]
