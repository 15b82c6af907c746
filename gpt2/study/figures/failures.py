"""Figures of failures: memory that grows from step to step, and memory that is reserved and of no use."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from gpt2.study.figures.drawing import Sheet, bytes_axis, drawn
from gpt2.study.figures.labels import note
from gpt2.study.palette import ALARM, CACHED, CACHED_EDGE, FAINT, INK, MIB, mib

_GROWS = MIB  # bytes a step: below it a line is level on any scale that shows the others


@drawn
def growth_by_habit(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """Memory allocated after each step, a line per habit; those that grow stand out.

    `table`: `habit`, `step`, `allocated_bytes`, `growth_bytes`.
    """
    last = table[table["step"] == table["step"].max()].set_index("habit")
    growing = last[last["growth_bytes"] >= _GROWS].sort_values("allocated_bytes", ascending=False)
    level = last[last["growth_bytes"] < _GROWS]
    worst = growing.iloc[0]
    title = title or (f"A habit that keeps the graph adds {mib(worst['growth_bytes'], 0)} a step; {len(level)} habits "
                      "add next to nothing")
    ends = "; ".join(f"{habit}: {mib(row['growth_bytes'])} a step" for habit, row in last.iterrows())
    sheet = Sheet(title, subtitle, width=9, height=3.7, says=f"Memory after each step. {ends}.")
    axes = sheet.axes(0.85, 0.46, 3.2, 0.2)
    steps = table["step"].max()
    axes.set(xlim=(1, steps), ylim=(0, 1.08 * table["allocated_bytes"].max()), xlabel="step")
    axes.set_xticks(range(1, steps + 1))
    for habit, rows in table.groupby("habit", sort=False):
        grows = habit in growing.index
        axes.plot(rows["step"], rows["allocated_bytes"], color=ALARM if grows else INK, marker="o", markersize=3.5,
                  clip_on=False, linewidth=1.4 if grows else 0.9)
    points = _apart(last["allocated_bytes"], axes.get_ylim()[1], 72 * (sheet.below - 0.66), 11.5)
    for habit, lift in points.items():
        note(axes, habit, 1, last["allocated_bytes"][habit], 8, lift, of="y", va="center",
             color=ALARM if habit in growing.index else INK)
    axes.axhline(level["allocated_bytes"].min(), color=FAINT, linewidth=0.6, zorder=0)
    bytes_axis(axes.yaxis, "memory allocated (MiB)")
    return sheet.figure


@drawn
def reserved_by_run(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """The largest reserved memory of each run, and how much of it was ever allocated at once.

    `table`: `configuration` and `allocated_bytes`, `reserved_bytes` of its steps; a run's largest values are drawn.
    """
    runs = table.groupby("configuration", sort=False)[["allocated_bytes", "reserved_bytes"]].max()
    over = runs["reserved_bytes"] - runs["allocated_bytes"]
    title = title or f"{over.idxmax()}: {mib(over.max(), 0)} more are reserved than are ever in use"
    told = "; ".join(f"{name} {mib(row['reserved_bytes'], 0)} for {mib(row['allocated_bytes'], 0)}"
                     for name, row in runs.iterrows())
    sheet = Sheet(title, subtitle, width=9, height=0.6 + 0.36 * len(runs), says=f"Reserved for allocated: {told}.")
    axes = sheet.axes(0.25 + max(sheet.text_inches(name) for name in runs.index), 0.46, 1.9, 0.06)
    axes.set(ylim=(len(runs) - 0.45, -0.55), xlim=(0, 1.02 * runs["reserved_bytes"].max()))
    for i, (_, row) in enumerate(runs.iterrows()):
        axes.barh(i, row["reserved_bytes"], 0.6, color=CACHED, edgecolor=CACHED_EDGE)
        axes.barh(i, row["allocated_bytes"], 0.6, color=INK)
        share = row["reserved_bytes"] / row["allocated_bytes"] - 1
        note(axes, "allocated", 0, i, 6, of="y", color="white", halo=False)
        note(axes, f"{mib(row['reserved_bytes'], 0)}, {share:.0%} more", row["reserved_bytes"], i, 6)
    axes.set_yticks(range(len(runs)), runs.index, size=8.5)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    bytes_axis(axes.xaxis, "largest reserved memory (MiB); dark is the largest allocated")
    return sheet.figure


def _apart(ends: pd.Series, top: float, height: float, least: float) -> dict[str, float]:
    """How many points each label is lifted from its line's end so that none is closer than `least` to the next."""
    wanted = (ends / top * height).sort_values(kind="stable")
    placed: list[float] = []
    for y in wanted:
        placed.append(max(y, placed[-1] + least) if placed else max(y - least, 4))
    return {habit: at - y for (habit, y), at in zip(wanted.items(), placed, strict=True)}
