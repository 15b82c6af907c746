"""The measured tables of notebooks 01 to 04: made from the traces of a real GPU, which say where they come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from gpt2.memory.trace import Trace
from gpt2.study import tables
from gpt2.study.experiments import SWEEP
from gpt2.study.findings import activations, capacity, lines, peak, questions

OF_ONE: dict[str, tuple[str, Callable[[Trace], pd.DataFrame]]] = {  # table: the experiment, and its rows
    "01-line-by-line": ("base", lines.lines),
    "01-sixteen-bytes": ("base", lines.states),
    "01-first-step": ("base", lines.peaks),
    "02-activations": ("base", activations.activations),
    "02-readings": ("readings", activations.readings),
    "03-peak-by-owner": ("base", peak.owners),
    "03-vocabulary-sized": ("base", peak.vocabulary_sized),
    "03-request": ("base", peak.request),
    "03-residual": ("base", peak.residuals),
    "03-missed": ("readings", peak.seen_and_missed),
    "03-workspaces": ("base", questions.workspaces),
    "03-slack": ("base", questions.slack),
    "03-spikes": ("base", questions.spikes),
    "03-gradients": ("base", questions.gradients),
    "03-tied-gradient": ("base", questions.tied_gradient),
    "03-logits": ("base", questions.logits_name),
    "03-logits-dropped": ("drop-logits", questions.logits_name),
}


def write(folder: Path) -> list[str]:
    """Write every table that the traces in `folder` allow; returns the names of those written."""
    written = []
    for name, (experiment, rows) in OF_ONE.items():
        if (folder / f"{experiment}.json.gz").is_file():
            trace = Trace.load(folder / f"{experiment}.json.gz")
            tables.keep(name, trace, rows(trace))
            written.append(name)
    return written + _growth(folder) + _sweeps(folder) + _instrument(folder)


def _growth(folder: Path) -> list[str]:
    """02-growth: what a block keeps at the lengths that were recorded."""
    traces = [
        Trace.load(path)
        for path in (folder / f"{name}.json.gz" for name in ("length-256", "length-512", "base"))
        if path.is_file()
    ]
    rows = [(trace.meta["recipe"]["length"], *activations.split(trace)) for trace in traces]
    if rows:
        tables.keep("02-growth", traces[-1], pd.DataFrame(rows, columns=["length", "linear_bytes", "square_bytes"]))
    return ["02-growth"] if rows else []


def _sweeps(folder: Path) -> list[str]:
    """04-sweep and 04-sweep-expandable: a row per batch, failed runs included."""
    written = []
    for ending in ("", "-expandable"):
        paths = [folder / f"sweep-{batch}{ending}.json.gz" for batch in SWEEP]
        traces = [Trace.load(path) for path in paths if path.is_file()]
        if traces:
            batches = [trace.meta["recipe"]["batch"] for trace in traces]
            capacity.keep_sweep(f"04-sweep{ending}", traces[0], capacity.sweep(traces), batches)
            written.append(f"04-sweep{ending}")
    return written


def _instrument(folder: Path) -> list[str]:
    """03-instrument: the peak with the instrument and without it."""
    names = ("plain", "base", "readings")
    traces = {name: Trace.load(path) for name in names if (path := folder / f"{name}.json.gz").is_file()}
    if not {"plain", "base"} <= set(traces):
        return []
    rows = [(name, len(trace), *peak.highest(trace)) for name, trace in traces.items()]
    columns = ["experiment", "event_count", "peak_allocated_bytes", "peak_reserved_bytes"]
    tables.keep("03-instrument", traces["plain"], pd.DataFrame(rows, columns=columns))
    return ["03-instrument"]
