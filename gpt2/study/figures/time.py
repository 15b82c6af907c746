"""Figures of time: kernels on the stream, what the optimizer's implementations cost, who waits for a copy."""

from __future__ import annotations

import pandas as pd
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gpt2.study.figures.drawing import Sheet, drawn
from gpt2.study.figures.labels import note
from gpt2.study.palette import ALARM, FAINT, INK, MIB, MUTED, number

_PHASES = {"batch": "#C9C9C9", "forward": "#A9A9A9", "backward": "#6E6E6E", "clip": "#BEBEBE", "optimizer": "#3A3A3A",
           "zero_grad": "#D6D6D6"}  # greys: colours belong to owners of memory


@drawn
def optimizers(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """Implementations of the same update: `implementation`, `kernel_count`, `update_ms`, `temporary_bytes`."""
    table = table.reset_index(drop=True)
    most, least = table.loc[table["kernel_count"].idxmax()], table.loc[table["kernel_count"].idxmin()]
    name = most["implementation"][:1].upper() + most["implementation"][1:]
    title = title or (f"{name} launches {most['kernel_count']:,} kernels, {least['implementation']} "
                      f"{least['kernel_count']:,}, for the same update")
    panels = [("kernel_count", "kernels (count)", 1, 0), ("update_ms", "time of the update (ms)", 1, 2),
              ("temporary_bytes", "temporaries (MiB)", MIB, 0)]
    panels = [panel for panel in panels if panel[0] in table]
    sheet = Sheet(title, subtitle, width=9, height=0.8 + 0.42 * len(table), says="; ".join(
        f"{row['implementation']}: " + ", ".join(f"{label} {number(row[column] / unit, digits)}"
                                                 for column, label, unit, digits in panels)
        for _, row in table.iterrows()) + ".")
    names = 0.3 + max(sheet.text_inches(name) for name in table["implementation"])
    width = (sheet.width - names - 0.3 - 0.3 * (len(panels) - 1)) / len(panels)
    for i, (column, label, unit, digits) in enumerate(panels):
        left = names + i * (width + 0.3)
        axes = sheet.axes(left, 0.46, sheet.width - left - width, 0.08)
        values = table[column] / unit
        axes.set(xlim=(0, 1.35 * max(values.max(), 1e-9)), ylim=(len(table) - 0.4, -0.6), xlabel=label)
        axes.barh(range(len(table)), values, 0.6, color=INK)
        for row, value in enumerate(values):
            note(axes, number(value, digits), value, row, 5)
        axes.xaxis.set_major_locator(_few())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        axes.set_yticks(range(len(table)), table["implementation"] if i == 0 else [""] * len(table), size=8.5)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
    return sheet.figure


@drawn
def kernel_timeline(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """Host and device during a step: `lane` ("host" | "device"), `phase`, `start_ms`, `duration_ms`, one row per piece.

    A piece is a kernel on the device and a launch, or whatever was recorded, on the host. Gaps stay white.
    """
    ends = table.assign(end_ms=table["start_ms"] + table["duration_ms"]).groupby("lane")["end_ms"].max()
    ahead = ends["device"] - ends["host"]
    device = table[table["lane"] == "device"]
    busy = device["duration_ms"].sum() / (ends["device"] - device["start_ms"].min())
    title = title or (f"The host is done {number(ahead)} ms before the device, which is busy {busy:.0%} of the time"
                      if ahead > 0.05 * ends.max()
                      else f"The device is busy {busy:.0%} of the time: it waits for the host")
    counts = ", ".join(f"{name} {len(rows):,}" for name, rows in device.groupby("phase", sort=False))
    sheet = Sheet(title, subtitle, width=9, height=2.5, says=f"Two lanes, host above device. Kernels: {counts}.")
    axes = sheet.axes(0.75, 0.46, 0.3, 0.1)
    axes.set(xlim=(0, 1.01 * ends.max()), ylim=(2.05, -0.45), xlabel="time since the step began (ms)")
    scale = axes.get_position().width * sheet.width / axes.get_xlim()[1]
    for y, lane in enumerate(("host", "device")):
        rows = table[table["lane"] == lane]
        for phase, part in rows.groupby("phase", sort=False):
            start, end = part["start_ms"].min(), (part["start_ms"] + part["duration_ms"]).max()
            boxes = [[(a, y), (a, y + 0.5), (b, y + 0.5), (b, y)] for a, b in _joined(part, 0.01 / scale)]
            axes.add_collection(PolyCollection(boxes, facecolors=_PHASES.get(phase, FAINT), linewidth=0))
            axes.plot([start, end], [y + 0.56] * 2, color=_PHASES.get(phase, FAINT), linewidth=1.6)
            text = f"{phase}: {len(part):,} kernels" if lane == "device" else phase
            text = text if sheet.text_inches(text, 8) + 0.05 < (end - start) * scale else phase
            if sheet.text_inches(text, 8) + 0.05 < (end - start) * scale:
                note(axes, text, (start + end) / 2, y, 0, 8, ha="center")
    said = f"host ahead by {number(ahead)} ms"
    if ahead * scale > sheet.text_inches(said, 8):
        reach = {"arrowstyle": "<->", "color": ALARM, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (ends["host"], 0.25), (ends["device"], 0.25), arrowprops=reach)
        note(axes, said, ends.mean(), 0.25, 0, 8, ha="center", color=ALARM)
    axes.set_yticks([0.25, 1.25], ["host", "device"], size=8.5)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    return sheet.figure


@drawn
def copies(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """Copies to the device: `memory`, `call`, `size_bytes`, `copy_ms`, `host_ms` (how long the call kept Python).

    A panel for each size; the dark part of a bar is the host's wait, the whole bar the copy.
    """
    sizes = sorted(set(table["size_bytes"]))
    big = table[table["size_bytes"] == sizes[-1]]
    slow, fast = big.loc[big["host_ms"].idxmax()], big.loc[big["host_ms"].idxmin()]
    title = title or (f"A {slow['memory']} copy holds Python for {number(slow['host_ms'], 2)} ms, a {fast['memory']} "
                      f"{fast['call']} one for {number(fast['host_ms'], 2)}")
    names = list(dict.fromkeys(table["memory"] + ", " + table["call"]))
    shown = " and ".join(f"{number(size / MIB, 2)} MiB" for size in sizes)
    sheet = Sheet(title, subtitle, width=9, height=0.95 + 0.42 * len(names),
                  says=f"Copy time and bandwidth at {shown}, for each kind of memory and call.")
    left0 = 0.3 + max(sheet.text_inches(name) for name in names)
    width = (sheet.width - left0 - 0.3 - 0.35 * (len(sizes) - 1)) / len(sizes)
    for i, size in enumerate(sizes):
        left = left0 + i * (width + 0.35)
        axes = sheet.axes(left, 0.46, sheet.width - left - width, 0.28)
        rows = table[table["size_bytes"] == size]
        rows = rows.set_index(rows["memory"] + ", " + rows["call"])
        reach = rows[["copy_ms", "host_ms"]].max().max()
        axes.set(xlim=(0, 1.5 * reach), ylim=(len(names) - 0.4, -0.6), xlabel="time (ms)")
        for y, name in enumerate(names):
            copy, host = rows.loc[name, "copy_ms"], rows.loc[name, "host_ms"]
            axes.barh(y, copy, 0.6, color=FAINT)
            axes.barh(y, host, 0.28, color=INK)
            note(axes, f"{number(size / copy / 1e6, 1)} GB/s", max(copy, host), y, 5)
        note(axes, f"{number(size / MIB, 2)} MiB", 0, 1, 0, 4, of="axes", va="bottom", weight="bold")
        if i == len(sizes) - 1:
            note(axes, "pale: copy, dark: Python waits", 1, 1, 0, 4, of="axes", va="bottom", ha="right", color=MUTED)
        axes.xaxis.set_major_locator(_few())
        axes.set_yticks(range(len(names)), names if i == 0 else [""] * len(names), size=8.5)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
    return sheet.figure


def _few() -> MaxNLocator:
    return MaxNLocator(4)


def _joined(pieces: pd.DataFrame, gap_ms: float) -> list[list[float]]:
    """(start, end) of the pieces, those joined whose gap is too small to be seen."""
    joined: list[list[float]] = []
    for start, duration in zip(pieces["start_ms"], pieces["duration_ms"], strict=True):
        if joined and start - joined[-1][1] < gap_ms:
            joined[-1][1] = max(joined[-1][1], start + duration)
        else:
            joined.append([start, start + duration])
    return joined
