"""Figures of getting memory back: the waterfall of savings, memory against time, the largest batch of each rung."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd
from matplotlib.figure import Figure

from gpt2.study.figures.drawing import Sheet, bytes_axis, drawn
from gpt2.study.figures.labels import marker, note, place, spread
from gpt2.study.palette import FAINT, GIB, INK, MUTED, colour, mib, number

_ROW = 0.32


@drawn
def waterfall(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """One saving after another: the first row of `saving`, `peak_bytes` is the baseline, the last what remains.

    An optional `category` names the owner that a saving takes from: a drop's colour, and its word if it is above 1 %.
    """
    table = table.reset_index(drop=True)
    peaks, start, end = table["peak_bytes"], table["peak_bytes"].iloc[0], table["peak_bytes"].iloc[-1]
    title = title or f"From {mib(start, 0)} to {mib(end, 0)}: {start / end:.1f} times less, one saving after another"
    drops = "; ".join(f"{name} {mib(after - before, 0, sign=True)}" for name, before, after in zip(
        table["saving"][1:], peaks[:-1], peaks[1:], strict=True))
    sheet = Sheet(title, subtitle, width=9, height=0.62 + _ROW * (len(table) + 1), says=f"A waterfall: {drops}.")
    owners = [owner if isinstance(owner, str) else "" for owner in table.get("category", [""] * len(table))]
    changes = [start, *peaks.diff()[1:]]
    words = [mib(change, 0, sign=i > 0) + (f", {owner}" if owner and change < -0.01 * start else "")
             for i, (change, owner) in enumerate(zip(changes, owners, strict=True))]
    right = 0.15 + max(map(sheet.text_inches, words))
    axes = sheet.axes(0.25 + max(map(sheet.text_inches, table["saving"])), 0.48, right, 0.05)
    axes.set(ylim=(len(table) + 0.4, -0.6), xlim=(0, 1.02 * peaks.max()))
    for i, (peak, change, owner, text) in enumerate(zip(peaks, changes, owners, words, strict=True)):
        low, high = min(peak, peak - change), max(peak, peak - change)
        axes.barh(i, high - low, 0.66, low, color=INK if i == 0 else colour(owner) if owner else FAINT)
        axes.plot([peak] * 2, [i - 0.33, i + 1.33], color=MUTED, linewidth=0.8)
        note(axes, text, high, i, 6)
    axes.barh(len(table), end, 0.66, color=INK)
    note(axes, mib(end, 0), end, len(table), 6, weight="bold")
    axes.set_yticks(range(len(table) + 1), [*table["saving"], "what remains"], size=8.5)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    bytes_axis(axes.xaxis, "peak allocated (MiB)")
    return sheet.figure


@drawn
def frontier(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """Memory against time: `configuration`, `peak_bytes`, `step_ms`. A line joins the points that none beats.

    An optional `least_ms`, the shortest step, is the end of a thin line from the point.
    """
    table = table.sort_values(["step_ms", "peak_bytes"]).reset_index(drop=True)
    beaten = table["peak_bytes"] >= table["peak_bytes"].astype(float).cummin().shift(fill_value=float("inf"))
    best = table[~beaten]
    least = best.iloc[-1]
    fastest = best.iloc[0]
    title = title or (f"Fastest: {fastest['configuration']}, {fastest['step_ms']:,.0f} ms; "
                      f"smallest: {least['configuration']}, {least['peak_bytes'] / GIB:.1f} GiB")
    sheet = Sheet(title, subtitle, width=9, height=4.8, says=f"{len(table)} configurations, peak memory over step "
                  f"time; none beats {', '.join(best['configuration'])}.")
    axes = sheet.axes(0.75, 0.46, 0.3, 0.12)
    axes.set(xlim=(0, 1.25 * table["step_ms"].max()), ylim=(0, 1.12 * table["peak_bytes"].max()))
    axes.set_xlabel("time per step (ms)")
    axes.plot(best["step_ms"], best["peak_bytes"], color=MUTED, linewidth=1, drawstyle="steps-post", zorder=1)
    if "least_ms" in table:
        axes.hlines(table["peak_bytes"], table["least_ms"], table["step_ms"], color=FAINT, linewidth=1.2, zorder=2)
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
    ratio = last["token_us"] / first["token_us"] if timed else float("nan")
    title = title or f"From a batch of {first['largest_batch']} to {last['largest_batch']:,} on the same card" + (
        f": a token takes {ratio:.2f} of the time" if pd.notna(ratio) else "")
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


@drawn
def estimate(table: pd.DataFrame, *, title: str = "", subtitle: str = "", unit: int = 10**9,
             name: str = "GB") -> Figure:
    """An estimate line by line, hollow, on what was found, filled: `line`, `category`, `estimate_bytes`, `found_bytes`.

    An optional `recorded_bytes` is a cross. Sizes in `unit`, called `name`.
    """
    table = table.reset_index(drop=True)
    guessed, found = table["estimate_bytes"].sum() / unit, table["found_bytes"].sum() / unit
    worst = (table["found_bytes"] - table["estimate_bytes"]).sort_values()
    low, high = table["line"][worst.index[0]], table["line"][worst.index[-1]]
    title = title or (f"Estimated {guessed:.1f} {name}, found {found:.1f}: "
                      f"{number(worst.iloc[0] / unit, 1, sign=True)} {low}, "
                      f"{number(worst.iloc[-1] / unit, 1, sign=True)} {high}")
    lines = "; ".join(f"{row['line']} {row['estimate_bytes'] / unit:.1f} estimated, "
                      f"{row['found_bytes'] / unit:.1f} found" for _, row in table.iterrows())
    sheet = Sheet(title, subtitle, width=9, height=0.9 + _ROW * len(table), says=f"Line by line in {name}: {lines}.")
    axes = sheet.axes(0.25 + max(sheet.text_inches(text) for text in table["line"]), 0.48, 1.9, 0.28)
    axes.set(ylim=(len(table) - 0.4, -0.6), xlim=(0, 1.05 * table[["estimate_bytes", "found_bytes"]].max().max()))
    for i, row in table.iterrows():
        axes.barh(i, row["found_bytes"], 0.62, color=colour(row["category"]))
        axes.barh(i, row["estimate_bytes"], 0.62, facecolor="none", edgecolor=INK, linewidth=1.2)
        if pd.notna(row.get("recorded_bytes")):
            axes.plot(row["recorded_bytes"], i, color=INK, linestyle="", clip_on=False, **marker("measured"))
        for x, size in ((66, row["estimate_bytes"]), (122, row["found_bytes"])):
            note(axes, number(size / unit, 1), 1, i, x, of="y", ha="right", weight="bold" if x > 100 else "normal")
    for x, head in ((66, "estimate"), (122, "found")):
        note(axes, f"{head}, {name}", 1, 1, x, 6, of="axes", ha="right", va="bottom", color=MUTED)
    axes.set_yticks(range(len(table)), table["line"], size=8.5)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    bytes_axis(axes.xaxis, f"at the peak ({name}); outline: the estimate, cross: recorded", unit=unit)
    return sheet.figure


def _share(value: float) -> str:
    return f"{number(100 * value, 0)} %"


def _stairs(x: list[float], y: list[float]) -> list[tuple[float, float]]:
    """Points along the line that runs level to the next x and then falls."""
    points = []
    for (x0, y0), (x1, y1) in pairwise(zip(x, y, strict=True)):
        points += [(x0 + (x1 - x0) * i / 40, y0) for i in range(41)]
        points += [(x1, y0 + (y1 - y0) * i / 40) for i in range(41)]
    return points


@drawn
def crossovers(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """What a saving saves of the baseline's peak, over the tokens of a step: `saving`, `tokens_count`, `peak_bytes`.

    The first `saving` is the baseline. An optional `category` names the owner that a saving takes from: its colour.
    """
    baseline = table["saving"].iloc[0]
    names = list(dict.fromkeys(table["saving"]))
    wide = table.pivot(index="tokens_count", columns="saving", values="peak_bytes")[names]
    saved = 1 - wide.drop(columns=baseline).div(wide[baseline], axis=0)
    owners = table.drop_duplicates("saving").set_index("saving").get("category", pd.Series(dtype=str))
    shades = {name: colour(owners[name]) if owners.get(name) else INK for name in saved}
    first, last = saved.index[0], saved.index[-1]
    best = saved.idxmax(axis=1)
    until = max(n for n in saved.index if best[n] == best[first])
    title = title or (f"Up to {until:,} tokens a step {best[first]} saves most, {_share(saved.loc[until].max())}; "
                      f"at {last:,} {best[last]}: {_share(saved.loc[last].max())}")
    lines = "; ".join(f"{name} {_share(saved[name].iloc[0])} to {_share(saved[name].iloc[-1])}" for name in saved)
    sheet = Sheet(title, subtitle, width=9, height=4.3,
                  says=f"Share of the peak saved, from {first} to {last:,} tokens a step: {lines}.")
    axes = sheet.axes(0.7, 0.46, 2.2, 0.12)
    x = range(len(saved))
    axes.set(xlim=(0, len(saved) - 1), ylim=(min(0, saved.min().min()) - 0.02, 1.06 * saved.max().max()))
    axes.axhline(0, color=MUTED, linewidth=0.8)
    for name in saved:
        axes.plot(x, saved[name], color=shades[name], linewidth=1.6, marker="o", markersize=3, clip_on=False)
    order = saved.iloc[-1].sort_values()
    rows = spread(list(order), 0.045 * axes.get_ylim()[1] * 1.3, *axes.get_ylim())
    for name, row in zip(order.index, rows, strict=True):
        axes.plot([len(saved) - 1, len(saved) - 0.88], [order[name], row], color=FAINT, linewidth=0.7, clip_on=False)
        note(axes, f"{name}, {_share(order[name])}", 1, row, 14, of="y", color=shades[name])
    axes.set_xticks(x, [f"{n:,}" for n in saved.index])
    axes.set_xlabel("tokens of a step (count)")
    axes.set_ylabel("saved of the baseline's peak (share)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    return sheet.figure
