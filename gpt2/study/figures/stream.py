"""Figures of the stream: where a step's time goes, the host's lead, what waiting costs, a loader that is late."""

from __future__ import annotations

import pandas as pd
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gpt2.study.figures.drawing import Sheet, drawn
from gpt2.study.figures.labels import note
from gpt2.study.figures.time import _PHASES, _joined
from gpt2.study.palette import ALARM, FAINT, INK, MUTED, number

_BARS = {"forward": "#A9A9A9", "backward": "#6E6E6E", "clip": "#D0D0D0", "optimizer": "#3A3A3A"}


@drawn
def by_kind(tables: dict[str, pd.DataFrame], *, title: str = "", subtitle: str = "") -> Figure:
    """Where the time of the kernels goes: for each recipe a table of `kind`, `phase`, `busy_ms`, `kernel_count`."""
    kinds = list(dict.fromkeys(kind for table in tables.values() for kind in table["kind"]))
    sums = {name: table.groupby("kind")["busy_ms"].sum() for name, table in tables.items()}
    shares = {name: total.get("matrix product", 0) / total.sum() for name, total in sums.items()}
    title = title or "Of the kernels' time products of matrices take " + ", ".join(
        f"{share:.0%} in {name}" for name, share in shares.items())
    said = {name: ", ".join(f"{kind} {number(ms)} ms" for kind, ms in total.items()) for name, total in sums.items()}
    sheet = Sheet(title, subtitle, width=9, height=0.95 + 0.25 * len(kinds), says=" ".join(
        f"{name}: {words}." for name, words in said.items()))
    names = 0.3 + max(sheet.text_inches(kind) for kind in kinds)
    width = (sheet.width - names - 0.3 - 0.4 * (len(tables) - 1)) / len(tables)
    for i, (name, table) in enumerate(tables.items()):
        left = names + i * (width + 0.4)
        axes = sheet.axes(left, 0.46, sheet.width - left - width, 0.3)
        axes.set(xlim=(0, 1.28 * sums[name].max()), ylim=(len(kinds) - 0.4, -0.6), xlabel="time of the kernels (ms)")
        for y, kind in enumerate(kinds):
            start = 0.0
            for phase, shade in _BARS.items():
                took = table.loc[(table["kind"] == kind) & (table["phase"] == phase), "busy_ms"].sum()
                axes.barh(y, took, 0.7, start, color=shade)
                start += took
            note(axes, number(sums[name].get(kind, 0.0)), start, y, 4)
        note(axes, f"{name}: {number(sums[name].sum())} ms", 0, 1, 0, 5, of="axes", va="bottom", weight="bold")
        if i == len(tables) - 1:
            _key(sheet, axes)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_yticks(range(len(kinds)), kinds if i == 0 else [""] * len(kinds), size=8.5)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
    return sheet.figure


def _key(sheet: Sheet, axes) -> None:
    """Which grey is which phase, written over the panel's lower right."""
    height = axes.get_position().height * sheet.height
    for i, (phase, shade) in enumerate(_BARS.items()):
        y = (0.62 - 0.16 * i) / height
        axes.plot([0.72, 0.76], [y, y], transform=axes.transAxes, color=shade, linewidth=6)
        note(axes, phase, 0.78, y, of="axes", color=MUTED)


@drawn
def lead(tables: dict[str, pd.DataFrame], *, title: str = "", subtitle: str = "") -> Figure:
    """Steps in a row without waiting: `step`, `host_ms`, `device_ms`, when each side ended it; a panel per recipe."""
    far = {name: (table["device_ms"] - table["host_ms"]).iloc[-1] for name, table in tables.items()}
    title = title or "At the end of the run the host is ahead by " + ", ".join(
        f"{number(ms)} ms ({name})" for name, ms in far.items())
    sheet = Sheet(title, subtitle, width=9, height=3.0, says="Two lines in each panel, the ends of steps on the "
                  "host and on the device; the space between them is the lead.")
    width = (sheet.width - 0.75 - 0.3 - 0.75 * (len(tables) - 1)) / len(tables)
    for i, (name, table) in enumerate(tables.items()):
        left = 0.75 + i * (width + 0.75)
        axes = sheet.axes(left, 0.46, sheet.width - left - width, 0.3)
        top = 1.12 * max(table["device_ms"].max(), table["host_ms"].max())
        axes.set(xlim=(0, table["step"].max() + 0.5), ylim=(0, top), xlabel="step",
                 ylabel="time since the run began (ms)" if i == 0 else "")
        axes.fill_between(table["step"], table["host_ms"], table["device_ms"], color=FAINT, alpha=0.5, linewidth=0)
        axes.plot(table["step"], table["device_ms"], color=INK, marker=".")
        axes.plot(table["step"], table["host_ms"], color=MUTED, marker=".", linestyle="--")
        last = table.iloc[-1]
        note(axes, "device", last["step"], last["device_ms"], -8, 6, ha="right", va="bottom")
        note(axes, "host", last["step"], last["host_ms"], -2, -12, ha="right", va="top", color=MUTED)
        note(axes, name, 0, 1, 0, 5, of="axes", va="bottom", weight="bold")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return sheet.figure


@drawn
def waiting(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """What a habit adds to a step: `recipe`, `says`, `added_ratio`, with a panel per recipe; no row for plain steps."""
    recipes, habits = list(dict.fromkeys(table["recipe"])), list(dict.fromkeys(table["says"]))
    worst = table.loc[table["added_ratio"].idxmax()]
    title = title or f"{worst['says']} makes a step {worst['added_ratio']:.0%} longer ({worst['recipe']})"
    sheet = Sheet(title, subtitle, width=9, height=0.95 + 0.27 * len(habits), says="; ".join(
        f"{row['says']}, {row['recipe']}: {row['added_ratio']:+.0%}" for _, row in table.iterrows()) + ".")
    names = 0.3 + max(sheet.text_inches(name) for name in habits)
    width = (sheet.width - names - 0.3 - 0.3 * (len(recipes) - 1)) / len(recipes)
    reach = max(table["added_ratio"].max(), 0.01)
    for i, recipe in enumerate(recipes):
        left = names + i * (width + 0.3)
        axes = sheet.axes(left, 0.46, sheet.width - left - width, 0.3)
        rows = table[table["recipe"] == recipe].set_index("says")["added_ratio"].reindex(habits)
        axes.set(xlim=(min(0, 1.2 * rows.min()), 1.35 * reach), ylim=(len(habits) - 0.4, -0.6),
                 xlabel="added to the step (%)")
        axes.barh(range(len(habits)), rows, 0.62, color=INK)
        for y, added in enumerate(rows):
            note(axes, f"{number(100 * added, 1, sign=True)}", max(added, 0), y, 4)
        note(axes, recipe, 0, 1, 0, 5, of="axes", va="bottom", weight="bold")
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:,.6g}")
        axes.set_yticks(range(len(habits)), habits if i == 0 else [""] * len(habits), size=8.5)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
    return sheet.figure


@drawn
def late_loader(timelines: dict[str, pd.DataFrame], *, title: str = "", subtitle: str = "") -> Figure:
    """Kernels over a few steps, one strip per timeline: `lane`, `step`, `phase`, `start_ms`, `duration_ms`.

    Stretches without kernels between the steps are marked with their length.
    """
    holes = {name: _holes(table) for name, table in timelines.items()}
    worst = max(holes, key=lambda name: max((b - a for a, b in holes[name]), default=0))
    longest = max((b - a for a, b in holes[worst]), default=0)
    title = title or f"A late loader leaves the GPU idle for {number(longest)} ms before the first kernel of a step"
    sheet = Sheet(title, subtitle, width=9, height=0.75 + 0.75 * len(timelines), says=" ".join(
        f"{name}: gaps of {', '.join(number(b - a) for a, b in gaps) or 'none'} ms between steps."
        for name, gaps in holes.items()))
    names = 0.3 + max(sheet.text_inches(name) for name in timelines)
    axes = sheet.axes(names, 0.46, 0.3, 0.05)
    ends = max((table["start_ms"] + table["duration_ms"]).max() for table in timelines.values())
    axes.set(xlim=(0, 1.01 * ends), ylim=(len(timelines) - 0.3, -0.6), xlabel="time (ms)")
    scale = axes.get_position().width * sheet.width / axes.get_xlim()[1]
    for y, (name, table) in enumerate(timelines.items()):
        device = table[table["lane"] == "device"]
        for phase, part in device.groupby("phase", sort=False):
            boxes = [[(a, y - 0.3), (a, y + 0.3), (b, y + 0.3), (b, y - 0.3)]
                     for a, b in _joined(part.sort_values("start_ms"), 0.01 / scale)]
            axes.add_collection(PolyCollection(boxes, facecolors=_PHASES.get(phase, FAINT), linewidth=0))
            if y == 0:
                once = part[part["step"] == part["step"].min()]
                start, end = once["start_ms"].min(), (once["start_ms"] + once["duration_ms"]).max()
                if (end - start) * scale > sheet.text_inches(phase, 8):
                    note(axes, phase, (start + end) / 2, y - 0.3, 0, 7, ha="center")
        for start, end in holes[name]:
            if (end - start) * scale > sheet.text_inches("00.0 ms", 8):
                axes.annotate("", (start, y), (end, y), arrowprops={"arrowstyle": "<->", "color": ALARM,
                                                                    "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0})
                note(axes, f"{number(end - start)} ms", (start + end) / 2, y, 0, 8, ha="center", color=ALARM)
    axes.set_yticks(range(len(timelines)), list(timelines), size=8.5)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    return sheet.figure


def _holes(table: pd.DataFrame) -> list[tuple[float, float]]:
    """From the last kernel of each step to the first of the next."""
    device = table[(table["lane"] == "device") & (table["step"] > 0)]
    ends = device.assign(end_ms=device["start_ms"] + device["duration_ms"]).groupby("step")
    first, last = ends["start_ms"].min(), ends["end_ms"].max()
    return [(float(last[step]), float(first[step + 1])) for step in sorted(first.index)[:-1] if step + 1 in first.index]


@drawn
def rates(table: pd.DataFrame, limit: float, *, title: str = "", subtitle: str = "") -> Figure:
    """Updates against the card's copy rate `limit`, TB/s: `model`, `implementation`, `rate`, `bytes_each`."""
    table = table.reset_index(drop=True)
    best = table.loc[table.loc[table["bytes_each"] == table["bytes_each"].min(), "rate"].idxmax()]
    title = title or (f"AdamW {best['implementation']} at {best['model']} moves {number(best['rate'], 2)} TB/s, "
                      f"{best['rate'] / limit:.0%} of what a copy reaches")
    names = [f"{row['model']}, {row['implementation']}" for _, row in table.iterrows()]
    sheet = Sheet(title, subtitle, width=9, height=0.75 + 0.3 * len(table), says="; ".join(
        f"{name} {number(rate, 2)} TB/s" for name, rate in zip(names, table["rate"], strict=True)) + ".")
    axes = sheet.axes(0.3 + max(sheet.text_inches(name) for name in names), 0.46, 0.3, 0.22)
    axes.set(xlim=(0, 1.3 * max(limit, table["rate"].max())), ylim=(len(table) - 0.4, -0.6),
             xlabel="bytes moved by the update, by rule, over its time (TB/s)")
    axes.barh(range(len(table)), table["rate"], 0.62, color=INK)
    axes.axvline(limit, color=ALARM, linewidth=1)
    note(axes, f"copy: {number(limit, 2)} TB/s", limit, 1, 4, 4, of="x", color=ALARM, va="bottom")
    for y, row in table.iterrows():
        inside = row["rate"] / limit > 0.75
        text = f"{number(row['rate'], 2)}, {row['bytes_each']:.0f} bytes per parameter"
        note(axes, text, row["rate"], y, -5 if inside else 5, ha="right" if inside else "left",
             color="white" if inside else INK, halo=not inside)
    axes.set_yticks(range(len(table)), names, size=8.5)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    return sheet.figure
