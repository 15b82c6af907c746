"""Figures of how much fits: the batch sweep, and reserved memory running away from allocated over the steps."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from gpt2.study.figures.drawing import Sheet, bytes_axis, drawn
from gpt2.study.figures.labels import marker, marker_key, note
from gpt2.study.palette import ALARM, CACHED, CACHED_EDGE, INK, MUTED, mib

_DOTTED, _DASHED = (0, (1, 1.5)), (0, (4, 2))
_RESERVED = "#7A7A7A"


@drawn
def batch_sweep(table: pd.DataFrame, *, capacity_bytes: int, fixed_bytes: int, sequence_bytes: float, gpu: str = "",
                title: str = "", subtitle: str = "") -> Figure:
    """Peaks over the batch size: allocated, reserved, the straight line that promises more, and the card's line.

    `table`: `kind`, `batch`, `peak_allocated_bytes`, `peak_reserved_bytes`, `fits`; runs out of memory are kept and
    marked. `fixed_bytes` and `sequence_bytes` are the straight line's.
    """
    works, fails = table[table["fits"].astype(bool)], table[~table["fits"].astype(bool)]
    kinds = list(dict.fromkeys(table["kind"]))
    largest, promised = int(works["batch"].max()), int((capacity_bytes - fixed_bytes) // sequence_bytes)
    title = title or f"The straight line promises {promised} sequences, {largest} fit: reserved memory fills the card"
    sheet = Sheet(title, subtitle, width=8.6, height=4.4,
                  says=f"Peak allocated and reserved memory over batch sizes {table['batch'].min()} to "
                       f"{table['batch'].max()}, and the {mib(capacity_bytes, 0)} of the card.")
    axes = sheet.axes(0.85, 0.46, 0.35, 0.3)
    right = max(1.07 * table["batch"].max(), 1.16 * promised)
    axes.set(xlim=(0, right), ylim=(0, 1.1 * capacity_bytes), xlabel="batch (sequences)")
    axes.axhline(capacity_bytes, color=ALARM, linewidth=1)
    note(axes, f"free at start{', ' + gpu if gpu else ''}: {mib(capacity_bytes, 0)}", 0.015, capacity_bytes, 0, 4,
         of="y", va="bottom", color=ALARM)
    axes.plot([0, right], [fixed_bytes, fixed_bytes + right * sequence_bytes], color=INK, linewidth=1,
              linestyle=_DOTTED)
    crossing = (capacity_bytes - fixed_bytes) / sequence_bytes
    axes.plot([crossing] * 2, [0, capacity_bytes], color=MUTED, linewidth=0.7, linestyle=_DOTTED)
    note(axes, f"straight line:\n{promised} fit", crossing, 0, 5, 26, color=MUTED)
    for column, shade in (("peak_reserved_bytes", _RESERVED), ("peak_allocated_bytes", INK)):
        for kind in kinds:
            rows = works[works["kind"] == kind].sort_values("batch")
            style = marker(kind) | {"markeredgecolor": shade}
            style["markerfacecolor"] = shade if style["markerfacecolor"] != "none" else "none"
            axes.plot(rows["batch"], rows[column], color=shade, linestyle="-" if kind.startswith("predicted") else "",
                      linewidth=0.9, zorder=3, **style)
    middle = works[works["batch"] <= 0.7 * largest].sort_values("batch").iloc[-1]
    bold = {"weight": "bold"}
    note(axes, "reserved", middle["batch"], middle["peak_reserved_bytes"], -8, 8, ha="right", color=_RESERVED, **bold)
    note(axes, "allocated", middle["batch"], middle["peak_allocated_bytes"], 8, -9, **bold)
    for batch in sorted(set(fails["batch"])):
        axes.plot(batch, capacity_bytes, marker="x", markersize=8, markeredgewidth=1.8, color=ALARM, zorder=5)
    if len(fails):
        note(axes, "out of memory", fails["batch"].min(), capacity_bytes, 10, 12, ha="right", color=ALARM)
    axes.axvline(largest, 0, 1 / 1.1, color=_RESERVED, linewidth=0.7, linestyle=_DASHED, zorder=0.5)
    note(axes, f"{largest} fit", largest, 0, -5, 12, ha="right", color=INK, weight="bold")
    marker_key(axes, kinds, 0.03, 0.82)
    bytes_axis(axes.yaxis, "peak memory (MiB)")
    return sheet.figure


@drawn
def fragmentation(table: pd.DataFrame, *, capacity_bytes: int | None = None, title: str = "",
                  subtitle: str = "") -> Figure:
    """Allocated and reserved peaks over the steps: the gap is memory that is held and of no use.

    `table`: `step`, `allocated_bytes`, `reserved_bytes`; an optional `configuration` gives each its own panel, an
    optional `fits` marks where a run ends.
    """
    table = table.assign(configuration=table["configuration"] if "configuration" in table else "")
    names = list(dict.fromkeys(table["configuration"]))
    ends = {name: table[table["configuration"] == name].iloc[-1] for name in names}
    gaps = {name: end["reserved_bytes"] - end["allocated_bytes"] for name, end in ends.items()}
    worst = max(gaps, key=gaps.get)
    title = title or f"After {ends[worst]['step']} steps {mib(gaps[worst], 0)} are reserved and of no use"
    apart = "; ".join(f"{name or 'the run'} ends {mib(gap, 0)} apart" for name, gap in gaps.items())
    sheet = Sheet(title, subtitle, width=9, height=3.8, says=f"Reserved and allocated memory over the steps: {apart}.")
    top = 1.12 * max(table["reserved_bytes"].max(), capacity_bytes or 0)
    width = (sheet.width - 1.15 - 0.25 * (len(names) - 1)) / len(names)
    for i, name in enumerate(names):
        left = 0.85 + i * (width + 0.25)
        axes = sheet.axes(left, 0.46, sheet.width - left - width, 0.4)
        rows, end = table[table["configuration"] == name], ends[name]
        steps, reserved, allocated = rows["step"], rows["reserved_bytes"], rows["allocated_bytes"]
        axes.set(xlim=(steps.min(), table["step"].max()), ylim=(0, top), xlabel="step")
        axes.fill_between(steps, allocated, reserved, facecolor=CACHED, edgecolor=CACHED_EDGE, linewidth=0.5)
        axes.plot(steps, reserved, color=_RESERVED)
        axes.plot(steps, allocated, color=INK)
        if i == 0:
            start = rows.iloc[: max(1, len(rows) // 4)]
            note(axes, "reserved", steps.max(), end["reserved_bytes"], -4, 8, ha="right", color=_RESERVED)
            note(axes, "allocated", steps.min(), start["allocated_bytes"].min(), 4, -10)
        heading = f"{name + ': ' if name else ''}{mib(gaps[name], 0)} apart in the last step"
        note(axes, heading, 0, 1, 0, 8, of="axes", va="bottom", weight="bold")
        if capacity_bytes:
            axes.axhline(capacity_bytes, color=ALARM, linewidth=1)
        if not end.get("fits", True):
            axes.plot(end["step"], end["reserved_bytes"], "x", color=ALARM, markersize=8, markeredgewidth=1.8,
                      clip_on=False)
        bytes_axis(axes.yaxis, "memory (MiB)" if i == 0 else "")
        axes.tick_params(axis="y", labelleft=i == 0)
    return sheet.figure
