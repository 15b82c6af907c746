"""Where the peak is and who asked for it: the tables of notebook 03."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from gpt2.memory.ledger import RESIDUAL, Ledger
from gpt2.memory.trace import Category, Mark, Trace
from gpt2.study import runs, tables
from gpt2.study.figures.step import window
from gpt2.study.runs import Beside
from gpt2.study.tables import MIB, Shown

STEP = 2
GROUPS = {  # the published rows
    "weights, Adam, masks, library workspaces": (
        Category.PARAMETERS,
        Category.OPTIMIZER,
        Category.INPUTS,
        Category.WORKSPACE,
        Category.SLACK,
        Category.TEMPORARIES,
    ),
    "saved activations of 12 blocks, embedding, final LayerNorm": (Category.ACTIVATIONS,),
    "four vocabulary-sized tensors in the cross-entropy": (Category.LOSS,),
}
_NAMES = {
    "aten.mm": "logits",
    "aten._log_softmax": "log-probabilities",
    "aten.nll_loss_backward": "gradient of the log-probabilities",
    "aten.nll_loss_forward": "log-probabilities",
    "aten._log_softmax_backward_data": "gradient of the logits",
}


def groups(trace: Trace) -> pd.DataFrame:
    """The peak of step 2 in the published rows. Columns: owner, size_bytes, share_ratio; last the total."""
    at = Ledger(trace).at(trace.peak({STEP})).set_index("category")["allocated_bytes"]
    sums = {name: int(sum(at[category.value] for category in members)) for name, members in GROUPS.items()}
    sums["total"] = int(at.sum())
    table = pd.DataFrame({"owner": sums.keys(), "size_bytes": sums.values()})
    return table.assign(share_ratio=table["size_bytes"] / sums["total"])


def owners(trace: Trace) -> pd.DataFrame:
    """The peak of step 2 by category, with the residual and the total. Columns: owner, size_bytes, share_ratio."""
    at = Ledger(trace).at(trace.peak({STEP}))
    at = at.rename(columns={"category": "owner", "allocated_bytes": "size_bytes"})
    at.loc[len(at)] = ["total", int(at["size_bytes"].sum()), float(at["share_ratio"].sum())]
    return at.astype({"size_bytes": int})


def peak_by_group(beside: Beside) -> Shown:
    """Three rows as published."""
    article = tables.published("03-peak").set_index("owner")["size_mib"].to_dict()
    table = tables.beside(beside, groups, ["owner"], "size_bytes", article=article)
    table.insert(1, f"share, {runs.source(beside.predicted)} (share)", groups(beside.predicted)["share_ratio"])
    return Shown(table, tables.caption("Who owns the peak of step 2", beside, article=True))


def peak_by_owner(beside: Beside) -> Shown:
    """Every category, and what is left over; saved as 03-peak-by-owner."""
    tables.save("03-peak-by-owner", beside, owners)
    table = tables.beside(beside, owners, ["owner"], "size_bytes")
    table.insert(1, f"{runs.source(beside.predicted)} (bytes)", owners(beside.predicted)["size_bytes"])
    return Shown(table, tables.caption("The ledger at the peak of step 2", beside))


def vocabulary_sized(trace: Trace) -> pd.DataFrame:
    """The vocabulary-sized tensors at the peak. Columns: tensor, operator, phase, event, size_bytes.

    `event` counts from 1 at the step's first event.
    """
    ledger, peak, (first, _) = Ledger(trace), trace.peak({STEP}), window(trace, STEP)
    rows = []
    for block, category in zip(ledger.blocks, ledger.categories, strict=True):
        if category is Category.LOSS and block.born <= peak and (block.died is None or block.died > peak):
            event = block.event
            rows.append(
                (
                    _NAMES.get(event.operator, event.operator),
                    event.operator,
                    event.phase,
                    block.born - first + 1,
                    event.requested_bytes,
                )
            )
    return pd.DataFrame(rows, columns=["tensor", "operator", "phase", "event", "size_bytes"])


def four_tensors(beside: Beside) -> Shown:
    """The vocabulary-sized tensors alive at the peak; saved as 03-vocabulary-sized."""
    tables.save("03-vocabulary-sized", beside, vocabulary_sized)
    ours = vocabulary_sized(beside.predicted)
    table = tables.beside(beside, vocabulary_sized, ["tensor"], "size_bytes")
    table.insert(1, "made by", ours["operator"].str.removeprefix("aten."))
    table.insert(2, "in", ours["phase"])
    table.insert(3, "at event of the step", ours["event"])
    return Shown(
        table,
        tables.caption(
            "Tensors of 8,192 x 50,257 numbers alive at the peak".replace(
                "8,192 x 50,257", f"{beside.recipe.tokens:,} x {beside.recipe.size.vocabulary:,}"
            ),
            beside,
        ),
    )


def request(trace: Trace) -> pd.DataFrame:
    """The request that set the peak. Columns: fact, value (text), unit."""
    owner, (first, _) = Ledger(trace).peak_owner({STEP}), window(trace, STEP)
    before = trace.events[first : owner.index]
    twice = len(before) + sum(event.action == "free" for event in before)
    rows = [
        ("asked for", f"{owner.requested_bytes:,}", "bytes"),
        ("asked for", f"{owner.requested_bytes / MIB:,.2f}", "MiB"),
        ("operator", owner.operator, ""),
        ("phase", owner.phase, ""),
        ("shape", " x ".join(map(str, owner.shape)), ""),
        ("events of the step before it", f"{len(before):,}", "count"),
        ("the same, a free counted twice as PyTorch's history does", f"{twice:,}", "count"),
        ("allocated after it", f"{owner.allocated_bytes:,}", "bytes"),
    ]
    return pd.DataFrame(rows, columns=["fact", "value", "unit"])


def peak_request(beside: Beside) -> Shown:
    """Who set the peak, on each card; saved as 03-request."""
    tables.save("03-request", beside, request)
    table = request(beside.predicted).rename(columns={"value": runs.source(beside.predicted)})
    for trace in beside.traces()[1:]:
        table[runs.source(trace)] = request(trace)["value"]
    return Shown(table, tables.caption("The request that set the peak of step 2", beside))


def blind(trace: Trace, readings: Sequence[Mark]) -> pd.DataFrame:
    """What readings see of the step. Columns: reading, size_bytes."""
    peak = trace.allocated_bytes()[trace.peak({STEP})]
    highest = max(readings, key=lambda mark: mark.allocated_bytes)
    rows = [
        (f"highest of {len(readings)} readings: after {highest.name}", highest.allocated_bytes),
        ("peak in the allocator's trace", peak),
        ("missed", peak - highest.allocated_bytes),
    ]
    return pd.DataFrame(rows, columns=["reading", "size_bytes"])


def missed(beside: Beside) -> Shown:
    """How much the hooks miss; saved as 03-missed. A recording with hooks joins where there is one."""
    seen = runs.recorded_readings(beside)
    tables.save("03-missed", seen, seen_and_missed)
    article = {}
    for name in seen_and_missed(beside.predicted)["reading"]:
        if tables.is_published(beside.predicted):
            highest, peak = tables.number("hooks_top"), tables.number("peak")
            article[name] = peak - highest if name == "missed" else peak if name.startswith("peak") else highest
    table = tables.beside(seen, seen_and_missed, ["reading"], "size_bytes", article=article)
    return Shown(table, tables.caption("Readings against the trace, step 2", seen, article=True))


def seen_and_missed(trace: Trace) -> pd.DataFrame:
    """`blind` for all readings of the step."""
    return blind(trace, readings_of(trace))


def readings_of(trace: Trace) -> list[Mark]:
    """All readings of the step."""
    return [mark for mark in trace.marks if mark.step == STEP]


def residuals(trace: Trace) -> pd.DataFrame:
    """What no owner explains, anywhere. Columns: checked, moment_count, largest_residual_bytes."""
    ledger = Ledger(trace)
    events, marks = ledger.timeline(), ledger.unexplained()
    rows = [
        ("allocated bytes after every event", len(events), int(events["residual_bytes"].abs().max())),
        ("the allocator's own counter at every mark", len(marks), int(marks["residual_bytes"].abs().max())),
    ]
    return pd.DataFrame(rows, columns=["checked", "moment_count", "largest_residual_bytes"])


def unexplained(beside: Beside) -> Shown:
    """The residual of the ledger, at every event and every mark of each trace; saved as 03-residual."""
    tables.save("03-residual", beside, residuals)
    parts = [residuals(trace).assign(run=runs.source(trace)) for trace in beside.traces()]
    table = pd.concat(parts)[["run", "checked", "moment_count", "largest_residual_bytes"]]
    table.columns = ["run", "owners add up to", "moments checked (count)", f"largest {RESIDUAL} (bytes)"]
    return Shown(table.reset_index(drop=True), tables.caption("What the ledger cannot explain", beside))


def untouched(beside: Beside) -> Shown:
    """Does looking change the step? The peak with and without the instrument; saved as 03-instrument."""
    rows = []
    pairs = [
        (
            beside.predicted,
            runs.predicted(runs.EXPERIMENTS["plain"], beside.predicted.meta["gpu"], runs.release(beside.predicted)),
        )
    ]
    if (plain := runs.recorded("plain")) is not None and beside.recorded is not None:
        pairs.append((runs.recorded("readings") or beside.recorded, plain))
    for looked, plain in pairs:
        for name, trace in (("with hooks, phases and owners", looked), ("without any", plain)):
            rows.append((runs.source(trace), name, len(trace), *highest(trace)))
    table = pd.DataFrame(
        rows, columns=["run", "instrument", "events", "peak allocated (bytes)", "peak reserved (bytes)"]
    )
    return Shown(table, tables.caption("The same three steps, watched and unwatched", beside))


def highest(trace: Trace) -> tuple[int, int]:
    """The allocator's own high-water marks: (allocated, reserved), over the steps after the first or over all."""
    marks = [mark for mark in trace.marks if mark.step > 1] or trace.marks
    allocated = max(mark.max_allocated_bytes for mark in marks)
    return allocated, max(mark.max_reserved_bytes for mark in trace.marks)
