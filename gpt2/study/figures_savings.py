"""Figures of getting memory back: the waterfall of savings, memory against time, the largest batch of each rung."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd
from matplotlib.figure import Figure

from gpt2.study.drawing import Sheet, bytes_axis, drawn
from gpt2.study.labels import note, place
from gpt2.study.palette import FAINT, GIB, INK, MUTED, colour, mib, number

_ROW = 0.32


@drawn
def waterfall(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """One saving after another: the first row of `saving`, `peak_bytes` is the baseline, the last what remains.

    An optional `category` names the owner that a saving takes from, and colours its drop.
    """
    table = table.reset_index(drop=True)
    peaks, start, end = table["peak_bytes"], table["peak_bytes"].iloc[0], table["peak_bytes"].iloc[-1]
    title = title or f"From {mib(start, 0)} to {mib(end, 0)}: {start / end:.1f} times less, one saving after another"
    drops = "; ".join(f"{name} {mib(after - before, 0, sign=True)}" for name, before, after in zip(
        table["saving"][1:], peaks[:-1], peaks[1:], strict=True))
    sheet = Sheet(title, subtitle, width=9, height=0.62 + _ROW * (len(table) + 1), says=f"A waterfall: {drops}.")
    axes = sheet.axes(0.25 + max(sheet.text_inches(name) for name in table["saving"]), 0.48, 0.75, 0.05)
    axes.set(ylim=(len(table) + 0.4, -0.6), xlim=(0, 1.02 * peaks.max()))
    for i, row in table.iterrows():
        before = peaks[i - 1] if i else 0
        owner = row.get("category")
        shade = INK if i == 0 else colour(owner) if isinstance(owner, str) and owner else FAINT
        axes.barh(i, abs(row["peak_bytes"] - before), 0.66, min(before, row["peak_bytes"]), color=shade)
        axes.plot([row["peak_bytes"]] * 2, [i - 0.33, i + 1.33], color=MUTED, linewidth=0.8)
        text = mib(row["peak_bytes"] - before, 0, sign=i > 0)
        note(axes, text, max(before, row["peak_bytes"]), i, 6)
    axes.barh(len(table), end, 0.66, color=INK)
    note(axes, mib(end, 0), end, len(table), 6, weight="bold")
    axes.set_yticks(range(len(table) + 1), [*table["saving"], "what remains"], size=8.5)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    bytes_axis(axes.xaxis, "peak allocated (MiB)")
    return sheet.figure


@drawn
def frontier(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """Memory against time: `configuration`, `peak_bytes`, `step_ms`. A line joins the points that none beats."""
    table = table.sort_values(["step_ms", "peak_bytes"]).reset_index(drop=True)
    beaten = table["peak_bytes"] >= table["peak_bytes"].astype(float).cummin().shift(fill_value=float("inf"))
    best = table[~beaten]
    least = best.iloc[-1]
    name = least["configuration"][:1].upper() + least["configuration"][1:]
    title = title or (f"{name} needs least, {least['peak_bytes'] / GIB:.1f} GiB; "
                      f"{best.iloc[0]['configuration']} is fastest, {best.iloc[0]['step_ms']:,.0f} ms a step")
    sheet = Sheet(title, subtitle, width=9, height=4.8, says=f"{len(table)} configurations, peak memory over step "
                  f"time; none beats {', '.join(best['configuration'])}.")
    axes = sheet.axes(0.75, 0.46, 0.3, 0.12)
    axes.set(xlim=(0, 1.12 * table["step_ms"].max()), ylim=(0, 1.12 * table["peak_bytes"].max()))
    axes.set_xlabel("time per step (ms)")
    axes.plot(best["step_ms"], best["peak_bytes"], color=MUTED, linewidth=1, drawstyle="steps-post", zorder=1)
    axes.scatter(table["step_ms"], table["peak_bytes"], s=26, color=[FAINT if b else INK for b in beaten], zorder=3)
    place(sheet, axes, list(zip(table["step_ms"], table["peak_bytes"], strict=True)), list(table["configuration"]),
          avoid=_stairs(list(best["step_ms"]), list(best["peak_bytes"])))
    bytes_axis(axes.yaxis, "peak allocated (GiB)", unit=GIB)
    return sheet.figure


@drawn
def ladder(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """The largest batch of each rung: `configuration`, `largest_batch` and, if known, `token_us`, time per token."""
    table = table.reset_index(drop=True)
    first, last = table.iloc[0], table.loc[table["largest_batch"].idxmax()]
    timed = "token_us" in table
    title = title or f"From a batch of {first['largest_batch']} to {last['largest_batch']:,} on the same card"
    rungs = "; ".join(f"{row['configuration']} {row['largest_batch']:,}" for _, row in table.iterrows())
    sheet = Sheet(title, subtitle, width=9, height=0.85 + _ROW * len(table),
                  says=f"Largest batch per configuration: {rungs}.")
    names = 0.25 + max(sheet.text_inches(name) for name in table["configuration"])
    axes = sheet.axes(names, 0.46, 2.1 if timed else 0.6, 0.3)
    axes.set(ylim=(len(table) - 0.4, -0.6), xlim=(0, 1.12 * table["largest_batch"].max()))
    axes.set_xlabel("largest batch (sequences)")
    axes.barh(range(len(table)), table["largest_batch"], 0.66, color=[FAINT, *[INK] * (len(table) - 1)])
    for i, row in table.iterrows():
        note(axes, f"{row['largest_batch']:,}", row["largest_batch"], i, 6, weight="bold")
        if timed:
            known, ratio = pd.notna(row["token_us"]), row["token_us"] / first["token_us"]
            note(axes, number(row["token_us"], 2) if known else "·", 1, i, 66, of="y", ha="right")
            note(axes, f"× {ratio:.2f}" if known else "", 1, i, 120, of="y", ha="right", color=MUTED)
    if timed:
        note(axes, "time per token (µs)", 1, 1, 120, 6, of="axes", ha="right", va="bottom", color=MUTED)
    axes.set_yticks(range(len(table)), table["configuration"], size=8.5)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    return sheet.figure


def _stairs(x: list[float], y: list[float]) -> list[tuple[float, float]]:
    """Points along the line that runs level to the next x and then falls."""
    points = []
    for (x0, y0), (x1, y1) in pairwise(zip(x, y, strict=True)):
        points += [(x0 + (x1 - x0) * i / 40, y0) for i in range(41)]
        points += [(x1, y0 + (y1 - y0) * i / 40) for i in range(41)]
    return points
