"""How big a batch fits, and what stands in the way: the tables of notebook 04."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from gpt2.memory import formulas, gpus
from gpt2.memory.ledger import Ledger
from gpt2.memory.trace import Trace
from gpt2.step import Recipe
from gpt2.study import runs, tables
from gpt2.study.experiments import A40_FREE_MIB, EXPANDABLE, EXPERIMENTS, SWEEP, Experiment
from gpt2.study.figures.segments import segments_before
from gpt2.study.runs import Beside
from gpt2.study.tables import MIB, Shown

FREE = A40_FREE_MIB * MIB
BATCHES = (*SWEEP, 24)  # those of the recordings, and one that is published besides
FAST = (8, 16, 20, 21)
COLUMNS = [
    "batch",
    "fits",
    "failed_step",
    "failed_operator",
    "asked_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
]


def experiment(batch: int, *, expandable: bool = False, length: int = 1024) -> Experiment:
    """One batch of the sweep, under the memory that the published A40 had free."""
    known = EXPERIMENTS.get(f"sweep-{batch}{'-expandable' if expandable else ''}")
    if known and length == known.recipe.length:
        return known
    return Experiment(
        f"sweep-{batch}",
        Recipe(batch=batch, length=length),
        limit_mib=A40_FREE_MIB,
        alloc_conf=EXPANDABLE if expandable else "",
    )


def row(trace: Trace) -> tuple:
    """A run as a row of the sweep, see `COLUMNS`; peaks of a run that failed are those up to the failure."""
    batch, failure = trace.meta["recipe"]["batch"], trace.meta["out_of_memory"]
    if not failure:
        allocated = max(mark.max_allocated_bytes for mark in trace.marks if mark.step > 1)
        return batch, True, None, None, None, allocated, max(mark.max_reserved_bytes for mark in trace.marks)
    failed = failure["operator"], failure["requested_bytes"]
    return batch, False, failure["step"], *failed, max(trace.allocated_bytes()), max(trace.reserved_bytes())


def sweep(traces: Sequence[Trace]) -> pd.DataFrame:
    """The rows of several runs; runs out of memory are kept and marked."""
    table = pd.DataFrame([row(trace) for trace in traces], columns=COLUMNS)
    return table.astype({"failed_step": "Int64", "asked_bytes": "Int64"})


class Sweep:
    """All batches on the notebook's card, as recorded, and on the card of the recording; native or expandable."""

    def __init__(
        self, batches: Sequence[int], *, gpu: str, torch_release: str, length: int = 1024, expandable: bool = False
    ):
        self.name = f"04-sweep{'-expandable' if expandable else ''}"
        found = [experiment(batch, expandable=expandable, length=length) for batch in batches]
        self.runs = [runs.beside(e, gpu=gpu, torch_release=torch_release) for e in found]
        self.predicted = sweep([run.predicted for run in self.runs])
        self.recorded = sweep([run.recorded for run in self.runs if run.recorded])
        self.twin = sweep([run.twin for run in self.runs if run.twin])
        self.baseline = next((run for run in self.runs if run.recipe.batch == 8), self.runs[0])
        self._save()

    def at(self, batch: int) -> Beside:
        """The run of one batch."""
        return next(run for run in self.runs if run.recipe.batch == batch)

    @property
    def largest(self) -> int:
        """The largest batch that fits."""
        return int(self.predicted.loc[self.predicted["fits"], "batch"].max())

    def _save(self) -> None:
        batches = [int(batch) for batch in self.predicted["batch"]]
        for table, pick in ((self.predicted, "predicted"), (self.twin, "twin")):
            trace = next((getattr(run, pick) for run in self.runs if getattr(run, pick)), None)
            if trace is not None:
                keep_sweep(self.name, trace, table, batches)


def keep_sweep(name: str, trace: Trace, table: pd.DataFrame, batches: Sequence[int]) -> None:
    """Write a sweep with the provenance of one of its traces, the batch apart."""
    config = {"batches": list(batches), "limit_mib": A40_FREE_MIB, "steps": trace.meta["steps"]}
    config |= {"recipe": trace.meta["recipe"] | {"batch": None}, "allocator_conf": trace.meta["allocator_conf"]}
    path = tables.results.table_path(trace.meta["kind"], name, runs.slug(trace.meta["gpu"]))
    tables.results.save_table(table, path, tables.provenance(trace, **config))


# --- the straight line ----------------------------------------------------------------------------------------------


def line(baseline: Trace, free_bytes: int = FREE) -> tuple[int, float]:
    """(fixed bytes, bytes per sequence) of the straight line through what is there between steps and one peak."""
    fixed = next(mark.allocated_bytes for mark in baseline.marks if (mark.name, mark.step) == ("zero_grad", 1))
    peak = max(mark.max_allocated_bytes for mark in baseline.marks if mark.step > 1)
    return fixed, formulas.bytes_per_sequence(peak, fixed, baseline.meta["recipe"]["batch"])


def straight_line(baseline: Beside, swept: Sweep, free_bytes: int = FREE) -> Shown:
    """The promise and the slope, published and predicted; saved as 04-straight-line."""
    fixed, each = line(baseline.predicted)
    fits = swept.predicted[swept.predicted["fits"]].set_index("batch")["peak_allocated_bytes"]
    slope = (fits.iloc[-1] - fits[16]) / (fits.index[-1] - 16) if 16 in fits.index and fits.index[-1] > 16 else None
    names = (
        "before_forward",
        "per_sequence_predicted",
        "straight_line",
        "straight_line_batch",
        "per_sequence_measured",
        "largest_batch",
        "free_at_start",
    )
    n = {name: tables.number(name) for name in names}
    rows = [
        ("fixed, between steps", "MiB", n["before_forward"], fixed / MIB),
        ("each sequence, from the peak at batch 8", "MiB", n["per_sequence_predicted"], each / MIB),
        ("free at start", "MiB", n["free_at_start"], free_bytes / MIB),
        ("where the line meets what is free", "sequences", n["straight_line"], (free_bytes - fixed) / each),
        (
            "so the line promises",
            "sequences",
            n["straight_line_batch"],
            formulas.straight_line_batch(free_bytes, fixed, each),
        ),
        ("each sequence, from batch 16 to the largest", "MiB", n["per_sequence_measured"], slope and slope / MIB),
        ("fits", "sequences", n["largest_batch"], swept.largest),
    ]
    frame = pd.DataFrame(rows, columns=["quantity", "unit", "published A40", runs.source(baseline.predicted)])
    tables.keep(
        "04-straight-line",
        baseline.predicted,
        frame.rename(columns={frame.columns[3]: "value"})[["quantity", "unit", "value"]],
    )
    if not tables.is_published(baseline.predicted):
        frame = frame.drop(columns="published A40")
    return Shown(frame, tables.caption("The straight line, and what the sweep says", baseline, article=True))


# --- the sweep ------------------------------------------------------------------------------------------------------


def show_sweep(swept: Sweep, what: str) -> Shown:
    """Verdicts and peaks of every batch: published, predicted, recorded."""
    ours, article = swept.predicted, tables.published("04-batch-sweep").set_index("batch")
    published = swept.name == "04-sweep" and swept.baseline.recipe == Recipe(batch=swept.baseline.recipe.batch)
    said = {batch: _verdict(fits, step) for batch, fits, step in article[["fits", "failed_step"]].itertuples()}
    table = pd.DataFrame({"batch": ours["batch"]})
    if published:
        table["published A40"] = [said.get(batch) for batch in ours["batch"]]
    sides = [(ours, runs.source(swept.baseline.predicted))]
    if len(swept.recorded):
        sides.append((swept.recorded, runs.source(next(run.recorded for run in swept.runs if run.recorded))))
    for side, source in sides:
        found = {r.batch: _verdict(r.fits, r.failed_step) for r in side.itertuples()}
        table[source] = [found.get(batch) for batch in ours["batch"]]
    for column, words in (("peak_allocated_bytes", "allocated"), ("peak_reserved_bytes", "reserved")):
        if published:
            peaks = article[column.replace("_bytes", "_mib")].reindex(ours["batch"])
            table[f"published A40 {words} (MiB)"] = peaks.to_numpy()
        for side, source in sides:
            peaks = side.set_index("batch")[column].where(side.set_index("batch")["fits"])
            table[f"{source} {words} (MiB)"] = peaks.reindex(ours["batch"]).to_numpy() / MIB
    if len(swept.twin):
        off = _differences(swept)
        for column, words in (("peak_allocated_bytes", "allocated"), ("peak_reserved_bytes", "reserved")):
            table[f"recorded less predicted H200 {words} (bytes)"] = [off[column].get(n) for n in ours["batch"]]
    return Shown(table, tables.caption(what, swept.baseline, article=published))


def _verdict(fits: bool, step) -> str:
    return "fits" if fits else "fails" if pd.isna(step) else f"fails in step {int(step)}"


def _differences(swept: Sweep) -> pd.DataFrame:
    columns = ["peak_allocated_bytes", "peak_reserved_bytes"]
    return swept.recorded.set_index("batch")[columns] - swept.twin.set_index("batch")[columns]


def figure_rows(swept: Sweep) -> pd.DataFrame:
    """The sweep for `figures.batch_sweep`: predicted and published for the A40, recorded on another card."""
    parts = [swept.predicted.assign(kind="predicted"), swept.recorded.assign(kind="measured")]
    if swept.baseline.recipe == Recipe(batch=swept.baseline.recipe.batch):
        article = tables.published("04-batch-sweep")
        for name in ("allocated", "reserved"):
            article[f"peak_{name}_bytes"] = article[f"peak_{name}_mib"] * MIB
        parts.append(article.assign(kind="published"))
    table = pd.concat(parts, ignore_index=True)
    return table[["kind", "batch", "fits", "peak_allocated_bytes", "peak_reserved_bytes"]]


def failures(swept: Sweep) -> Shown:
    """The first request that failed, at each batch that does not fit, on the card and in the recording."""
    rows = []
    for run in swept.runs:
        for trace in run.traces():
            failure = trace.meta["out_of_memory"]
            if failure:
                rows.append(
                    (
                        run.recipe.batch,
                        runs.source(trace),
                        failure["step"],
                        failure["phase"],
                        failure["operator"].removeprefix("aten."),
                        failure["requested_bytes"],
                    )
                )
    table = pd.DataFrame(rows, columns=["batch", "run", "step", "phase", "operator", "asked (bytes)"])
    table["asked (MiB)"] = table["asked (bytes)"] / MIB
    return Shown(table, tables.caption("The requests that failed", swept.baseline))


# --- the request that failed ----------------------------------------------------------------------------------------


def same_moment(trace: Trace) -> int:
    """Index of the request for the gradient of the logits in step 2, whether it fails or not."""
    return next(
        i
        for i, event in enumerate(trace.events)
        if event.step == 2 and event.action in ("alloc", "oom") and "log_softmax_backward" in event.operator
    )


def account(trace: Trace, free_bytes: int = FREE) -> pd.DataFrame:
    """Where the card's memory is when the gradient of the logits is asked for in step 2. Columns: part, size_bytes."""
    index = same_moment(trace)
    held = segments_before(trace, index, Ledger(trace).categories)
    holes = sorted((s.size for segment in held for s in segment.stretches if s.category is None), reverse=True)
    reserved = sum(segment.size for segment in held)
    asked = trace.events[index].requested_bytes
    rows = [
        ("live blocks", reserved - sum(holes)),
        ("free, in holes", sum(holes)),
        ("left on the card", free_bytes - reserved),
        ("together: free at start", free_bytes),
        ("asked for", asked),
        ("largest hole", holes[0]),
        ("hole count", len(holes)),
        ("short of a new segment by", _short(asked, holes[0], free_bytes - reserved)),
    ]
    return pd.DataFrame(rows, columns=["part", "size_bytes"])


def _short(asked: int, hole: int, left: int) -> int:
    """What a request lacks that no hole takes: its own segment would be rounded up to 2 MiB."""
    return 0 if hole >= asked else max(0, -(-asked // (2 * MIB)) * 2 * MIB - left)


def show_accounts(**traces: Trace) -> Shown:
    """The same moment in several runs; saved as 04-failing-request."""
    parts = {name.replace("_", " "): account(trace).set_index("part")["size_bytes"] for name, trace in traces.items()}
    table = pd.DataFrame(parts)
    counts = table.loc["hole count"]
    shown = (table.drop("hole count") / MIB).rename(columns=lambda name: f"{name} (MiB)").reset_index()
    shown.loc[len(shown)] = ["holes (count)", *counts]
    first = next(iter(traces.values()))
    tidy = table.reset_index().melt("part", var_name="run", value_name="size_bytes")
    tables.keep("04-failing-request", first, tidy[["run", "part", "size_bytes"]])
    return Shown(
        shown, f"When step 2 asks for the gradient of the logits. {runs.source(first)}, torch {runs.release(first)}."
    )


def intruders(trace: Trace) -> Shown:
    """Who sits in the segment with the largest hole, and what it was made for; saved as 04-intruders."""
    index, ledger = same_moment(trace), Ledger(trace)
    held = segments_before(trace, index, ledger.categories)
    hole = max((s.size, segment.address) for segment in held for s in segment.stretches if s.category is None)
    segment = next(segment for segment in held if segment.address == hole[1])
    born = next(
        i
        for i in range(index, -1, -1)
        if trace.events[i].action == "segment_alloc" and trace.events[i].address == segment.address
    )
    first = trace.events[born + 1]
    rows = [
        (
            "made for",
            f"{first.operator.removeprefix('aten.')}, {first.phase}, step {first.step}",
            first.requested_bytes,
        )
    ]
    for block, category in zip(ledger.blocks, ledger.categories, strict=True):
        event = block.event
        inside = segment.address <= event.address < segment.address + segment.size
        if inside and block.born < index and (block.died is None or block.died >= index):
            who = (
                f"{event.module or 'model'}, {event.operator.removeprefix('aten.')}, {event.phase}, step {event.step}"
            )
            rows.append((f"now holds: {category.value}", who, event.block_bytes))
    rows.append(("largest hole", "", hole[0]))
    table = pd.DataFrame(rows, columns=["what", "who", "size_bytes"])
    tables.keep("04-intruders", trace, table)
    table["size (MiB)"] = table.pop("size_bytes") / MIB
    return Shown(table, f"The segment of {segment.size / MIB:,.0f} MiB with the largest hole. {runs.source(trace)}.")


# --- names, and what nvidia-smi shows -------------------------------------------------------------------------------


def one_name_fewer(batches: Sequence[int], swept: Sweep) -> Shown:
    """Peaks of the model as it is, and of one whose attention binds `y` again; saved as 04-names."""
    rows = []
    for batch in batches:
        kept = swept.at(batch).predicted
        rebound = runs.predicted(replace(experiment(batch), variant="one name"), kept.meta["gpu"], runs.release(kept))
        pair = [sweep([trace]).iloc[0] for trace in (kept, rebound)]
        rows.append((batch, *(bool(run["fits"]) for run in pair), *(run["peak_reserved_bytes"] for run in pair)))
    columns = ["batch", "fits", "rebound_fits", "peak_reserved_bytes", "rebound_peak_reserved_bytes"]
    table = pd.DataFrame(rows, columns=columns)
    tables.keep("04-names", swept.baseline.predicted, table)
    article = tables.published("04-batch-sweep").set_index("batch")["peak_reserved_mib"]
    both = table["fits"] & table["rebound_fits"]
    two, one = (table[name].where(table[fits]) / MIB for name, fits in zip(columns[3:], columns[1:3], strict=True))
    shown = pd.DataFrame(
        {
            "batch": table["batch"],
            "published A40 reserved (MiB)": article.reindex(table["batch"]).to_numpy(),
            "two names: reserved (MiB)": two,
            "one name: reserved (MiB)": one,
        }
    )
    shown["difference (MiB)"] = (two - one).where(both)
    shown["one tensor of B·T·D (MiB)"] = table["batch"] * swept.baseline.recipe.length * 768 * 4 / MIB
    shown["fits with two names"], shown["with one"] = table["fits"], table["rebound_fits"]
    only = Beside(swept.baseline.predicted, None, None)
    return Shown(
        shown, tables.caption("Peak reserved with attention's output under two names and under one", only, True)
    )


def nvidia_smi(swept: Sweep, batch: int) -> Shown:
    """What the driver counts as used at the peak: reserved and the context; saved as 04-nvidia-smi."""
    rows = []
    for trace in swept.at(batch).traces():
        total = trace.meta.get("total_bytes") or gpus.find(trace.meta["gpu"]).memory_bytes
        reserved = max(mark.max_reserved_bytes for mark in trace.marks)
        allocated = max(mark.max_allocated_bytes for mark in trace.marks if mark.step > 1)
        context = total - trace.meta["capacity_bytes"]
        rows.append((runs.source(trace), allocated, reserved - allocated, context, reserved + context))
    columns = ["run", "peak_allocated_bytes", "reserved_above_bytes", "context_bytes", "used_bytes"]
    table = pd.DataFrame(rows, columns=columns)
    tables.keep("04-nvidia-smi", swept.baseline.predicted, table[:1])
    shown = table.set_index("run").div(MIB).reset_index()
    heads = ("peak allocated", "reserved above it", "outside the allocator", "used on the card")
    shown.columns = ["run", *(f"{head} (MiB)" for head in heads)]
    return Shown(shown, f"Batch {batch} at its peak. Outside the allocator: total less free at start.")
