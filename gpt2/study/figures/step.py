"""Figures of one training step: the lines of the loop, what a block saves, the mountain, the stack by owner, the trace.

Each function takes tables or traces and returns a `Figure`. A *timeline* is a table with one column per `Category`
value and one row per allocator event, in bytes, whose index is the event's index in the trace (`ledger.timeline`).
*Readings* are `Mark`s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gpt2.memory.trace import Category, Event, Mark, Trace
from gpt2.study.figures.drawing import Sheet, bytes_axis, conditions, drawn
from gpt2.study.figures.labels import (
    ledger_bar,
    marker,
    marker_key,
    name_spans,
    note,
    owners,
    pointer,
    spans,
    thin_ticks,
)
from gpt2.study.palette import ALARM, FAINT, INK, MIB, MUTED, colour, ink_on, mib, number, tint

_ROW = 0.235  # inches per row of a chart that is a list
_DOTTED, _DASHED = (0, (1, 1.5)), (0, (4, 2))
_HOOK = colour(Category.PARAMETERS)


@drawn
def staircase(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """What each line of the training loop adds or gives back, as stairs, with every kind of number beside them.

    `table` is tidy: `line`, `kind`, `change_bytes`, `allocated_bytes` (after the line) and, where there is more than
    one of a kind, `gpu`. The stairs are drawn from the first source that has `allocated_bytes`.
    """
    table = table.assign(source=table["kind"] + ("\n" + table["gpu"] if "gpu" in table else ""))
    stairs = table[table["allocated_bytes"].notna()]
    stairs = stairs[stairs["source"] == stairs["source"].iloc[0]].reset_index(drop=True)
    sources = list(dict.fromkeys(table["source"]))
    changes = table.set_index(["line", "source"])["change_bytes"]
    largest = stairs.loc[stairs["change_bytes"].abs().idxmax()]
    line = largest["line"].split(", step")[0]
    title = title or f"No line moves more than {line}: {mib(abs(largest['change_bytes']))}"
    column, names = 0.95, 0.25 + 0.065 * max(map(len, stairs["line"]))
    sheet = Sheet(title, subtitle, width=9, height=1.1 + _ROW * len(stairs),
                  says=f"A staircase of the memory allocated after each of {len(stairs)} lines of the training loop.")
    axes = sheet.axes(names, 0.48, column * len(sources) + 0.35, 0.57)
    before = stairs["allocated_bytes"] - stairs["change_bytes"]
    axes.set(ylim=(len(stairs) - 0.4, -0.6), xlim=(0, 1.03 * max(stairs["allocated_bytes"].max(), before.max())))
    axes.set_yticks([])
    for i, row in stairs.iterrows():
        after, change = row["allocated_bytes"], row["change_bytes"]
        axes.barh(i, abs(change), 0.62, min(before[i], after), color=INK if change > 0 else FAINT)
        axes.plot([after, after], [i - 0.31, i + (1.31 if i < len(stairs) - 1 else 0.31)], color=INK, linewidth=0.9)
        note(axes, row["line"], 0, i, -5, of="y", ha="right", size=7.6, family="DejaVu Sans Mono")
        for j, source in enumerate(sources, start=1):
            value = changes.get((row["line"], source), np.nan)
            text = "·" if np.isnan(value) else number(value / MIB, 1 if value else 0, sign=True)
            note(axes, text, 1, i, 72 * column * j, of="y", ha="right", color=INK if abs(value) > 0 else MUTED)
    for j, source in enumerate(sources, start=1):
        note(axes, source, 1, 1, 72 * column * j, 6, of="axes", ha="right", va="baseline", color=MUTED)
    note(axes, "change (MiB)", 1, 1, 72 * column * len(sources), 30, of="axes", ha="right", va="bottom", color=MUTED)
    bytes_axis(axes.xaxis, "memory allocated (MiB): dark is added, grey given back", ticks=5)
    return sheet.figure


@drawn
def saved_tensors(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """What one block keeps for backward, tensor by tensor: `tensor`, `shape` (text or tuple), `saved_bytes`.

    An optional `category` colours the bar (default activations); the largest tensor stands out.
    """
    table = table.sort_values("saved_bytes", ascending=False, kind="stable").reset_index(drop=True)
    total, top = table["saved_bytes"].sum(), table.iloc[0]
    name = top["tensor"][:1].upper() + top["tensor"][1:]
    title = title or f"{name}: {mib(top['saved_bytes'], 0)} of the {mib(total, 0)} a block keeps for backward"
    sheet = Sheet(title, subtitle, width=8.4, height=0.62 + 0.34 * len(table),
                  says=f"Bars of {len(table)} saved tensors, largest first.")
    axes = sheet.axes(0.2 + max(sheet.text_inches(name) for name in table["tensor"]), 0.46, 0.35, 0.1)
    reach = 1.32 * top["saved_bytes"]
    axes.set(ylim=(len(table) - 0.4, -0.6), xlim=(0, reach))
    for i, row in table.iterrows():
        base = colour(row.get("category") or Category.ACTIVATIONS)
        axes.barh(i, row["saved_bytes"], height=0.66, color=base if i == 0 else tint(base, 0.5))
        shape = row["shape"] if isinstance(row["shape"], str) else " × ".join(f"{n:,}" for n in row["shape"])
        text, inside = f"{mib(row['saved_bytes'])}   {shape}", row["saved_bytes"] > 0.6 * reach
        note(axes, text, row["saved_bytes"], i, -6 if inside else 6, ha="right" if inside else "left", halo=not inside,
             color=ink_on(base if i == 0 else tint(base, 0.5)) if inside else INK)
    axes.set_yticks(range(len(table)), table["tensor"], size=8.5)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    bytes_axis(axes.xaxis, "saved for backward (MiB)")
    return sheet.figure


@drawn
def mountain(trace: Trace, timeline: pd.DataFrame, readings: Sequence[Mark], *, title: str = "",
             subtitle: str = "") -> Figure:
    """The readings of one step in order, each a bar stacked by owner, and among them the peak that none of them saw."""
    step = readings[-1].step
    peak = trace.peak({step})
    indices = [reading.event_count - 1 for reading in readings]
    at = sum(index < peak for index in indices)
    indices.insert(at, peak)
    stacks = owners(timeline).loc[[max(index, timeline.index[0]) for index in indices]]
    highest, most = max(reading.allocated_bytes for reading in readings), int(stacks.iloc[at].sum())
    title = title or f"{len(readings)} readings see {mib(highest, 0)}; the summit, {mib(most, 0)}, falls between two"
    sheet = Sheet(title, subtitle or conditions(trace), width=9, height=4.4,
                  says=f"Bars stacked by owner, one for each of {len(readings)} readings over a step.")
    axes = sheet.axes(0.85, 0.46, 2.75, 0.34)
    axes.set(xlim=(-0.7, len(indices) - 0.3), ylim=(0, 1.06 * most))
    _bars(axes, np.arange(len(indices)), stacks, width=0.84)
    axes.add_patch(Rectangle((at - 0.48, 0), 0.96, most, fill=False, edgecolor=INK, linewidth=1.1, zorder=4))
    phases = [trace.events[i].phase if i >= 0 and trace.events[i].step == step else "" for i in indices]
    name_spans(sheet, axes, [(name, a - 0.5, b - 0.5) for name, a, b in spans(phases)])
    axes.plot([-0.7, at - 0.5], [highest, highest], color=MUTED, linewidth=0.8, linestyle=_DOTTED)
    note(axes, f"highest reading {mib(highest, 0)}", 0.015, highest, 0, 3, of="y", va="bottom", color=MUTED)
    bytes_axis(axes.yaxis, "memory allocated (MiB)")
    axes.set_xlabel(f"{len(readings)} readings in order, and the peak, outlined")
    axes.set_xticks([0, at, len(indices) - 1], ["1", "peak", str(len(readings))])
    ledger_bar(sheet, axes, stacks.iloc[at], "at the peak", shown=stacks.columns[stacks.max() > 0])
    return sheet.figure


@drawn
def step_by_owner(trace: Trace, timeline: pd.DataFrame, *, step: int = 2, title: str = "",
                  subtitle: str = "") -> Figure:
    """One step, event by event, stacked by owner, with the high-water line and who asked for the last of the peak."""
    first, past = window(trace, step)
    peak = trace.peak({step})
    rows = owners(timeline).loc[first:past - 1]
    kept, event, count = rows.loc[peak], trace.events[peak], past - first
    most = int(kept.sum())
    title = title or f"{mib(most, 0)} at the peak: {_shares(kept)}"
    sheet = Sheet(title, subtitle or conditions(trace), width=9, height=4.5,
                  says=f"Memory over the {count:,} allocator events of step {step}, stacked by owner; at the peak "
                       f"{asked(event)}.")
    axes = sheet.axes(0.85, 0.46, 2.75, 0.34)
    axes.set(xlim=(0, count), ylim=(0, 1.13 * most))
    x, floor = np.append(rows.index.to_numpy() - first, count), np.zeros(count + 1)
    for category in Category:
        if category.value in rows:
            top = floor + np.append(rows[category.value].to_numpy(), rows[category.value].iloc[-1])
            axes.fill_between(x, floor, top, step="post", color=colour(category), linewidth=0)
            floor = top
    axes.step(x, np.maximum.accumulate(floor), where="post", color=INK, linewidth=1, linestyle=_DASHED)
    name_spans(sheet, axes, spans(event.phase for event in trace.events[first:past]))
    side = -1 if peak - first > 0.5 * count else 1
    note(axes, f"{mib(most)}: {asked(event)}", peak - first, most, 6 * side, 10, ha="left" if side > 0 else "right")
    note(axes, "high-water line", 0.985, most, 0, -9, of="y", ha="right", color=MUTED)
    bytes_axis(axes.yaxis, "memory allocated (MiB)")
    axes.set_xlabel(f"allocator events of step {step} (count)")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    ledger_bar(sheet, axes, kept, "at the peak", shown=rows.columns[rows.max() > 0])
    return sheet.figure


@drawn
def allocator_trace(trace: Trace, readings: Sequence[Mark], *, step: int = 2, title: str = "",
                    subtitle: str = "") -> Figure:
    """Allocated memory at every event of a step, the hooks' readings on it, and what falls between them."""
    first, past = window(trace, step)
    peak, curve, count = trace.peak({step}), allocated(trace), past - first
    most, owner = curve[peak], asked(trace.events[peak])
    readings = [reading for reading in readings if first <= reading.event_count <= past]
    highest = max(reading.allocated_bytes for reading in readings)
    before, after = (at - first for at in blind_spot(trace, readings, step))
    title = title or f"The hooks miss {mib(most - highest, 0)}: the peak lives and dies between two readings"
    sheet = Sheet(title, subtitle or conditions(trace), width=9, height=4.3,
                  says=f"Over step {step} the allocator's curve reaches {mib(most)}, where {owner}; the "
                       f"{len(readings)} readings of the hooks stay at or below {mib(highest)}.")
    axes = sheet.axes(0.85, 0.46, 0.3, 0.34)
    axes.set(xlim=(0, count), ylim=(0, 1.16 * most))
    x, y = np.arange(count + 1), np.append(curve[first:past], curve[past - 1])
    axes.fill_between(x, y, step="post", color="#EFEFEF", linewidth=0)
    axes.axvspan(before, after, color=tint(ALARM, 0.2), linewidth=0, zorder=1.5)
    axes.step(x, y, where="post", color="#4A4A4A", linewidth=0.8)
    axes.plot([r.event_count - first for r in readings], [r.allocated_bytes for r in readings], "o", markersize=4,
              color=_HOOK, markeredgecolor="white", markeredgewidth=0.4, zorder=5, clip_on=False)
    name_spans(sheet, axes, spans(event.phase for event in trace.events[first:past]))
    side, edge = (-1, before) if peak - first > 0.5 * count else (1, after)
    words, beside = {"ha": "right" if side < 0 else "left"}, edge + side * 0.014 * count
    axes.axhline(highest, color=_HOOK, linewidth=0.8, linestyle=_DOTTED)
    reach = {"arrowstyle": "<->", "color": ALARM, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (beside, most), (beside, highest), arrowprops=reach)
    note(axes, f"peak {mib(most)}\n{owner}", peak - first, most, side * 22, 13,
         arrowprops=pointer() | {"relpos": (0 if side > 0 else 1, 0.5)}, **words)
    unseen = f"blind spot of the hooks: {after - before} events, {mib(most - highest)}"
    note(axes, unseen, beside, (most + highest) / 2, side * 7, -2, color=ALARM, **words)
    note(axes, f"highest of {len(readings)} readings: {mib(highest)}", 0.015 if side < 0 else 0.985, highest, 0, 3,
         of="y", va="bottom", ha="left" if side < 0 else "right", color=_HOOK)
    bytes_axis(axes.yaxis, "memory allocated (MiB)")
    axes.set_xlabel(f"allocator events of step {step} (count)")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return sheet.figure


@drawn
def growth(table: pd.DataFrame, *, title: str = "", subtitle: str = "") -> Figure:
    """What a block keeps as the sequence grows: the part that grows with T and the part that grows with T².

    `table`: `length`, `linear_bytes`, `square_bytes`, and `kind` (default predicted); every kind is marks on the total.
    """
    table = table.assign(kind=table["kind"] if "kind" in table else "predicted").sort_values("length")
    kinds = list(dict.fromkeys(table["kind"]))
    last = table.iloc[-1]
    length, linear, square = last["length"], last["linear_bytes"], last["square_bytes"]
    share = square / (linear + square)
    title = title or f"At {length:,} tokens the attention probabilities are {share:.0%} of a block: they grow with T²"
    sheet = Sheet(title, subtitle, width=8.4, height=3.9, says=f"Two areas over lengths {table['length'].min():,} to "
                  f"{length:,}, one under a straight line, one under a parabola; {mib(linear + square, 0)} in the end.")
    axes = sheet.axes(0.85, 0.46, 2.0, 0.12)
    base, fine = colour(Category.ACTIVATIONS), np.linspace(0, length, 200)
    straight, parabola = linear * fine / length, square * (fine / length) ** 2
    axes.set(xlim=(0, length), ylim=(0, 1.06 * (linear + square)), xlabel="sequence length T (tokens)")
    axes.fill_between(fine, straight, color=tint(base, 0.5), linewidth=0)
    axes.fill_between(fine, straight, straight + parabola, color=base, linewidth=0)
    for kind in kinds:
        rows = table[table["kind"] == kind]
        total = rows["linear_bytes"] + rows["square_bytes"]
        axes.plot(rows["length"], total, linestyle="", color=INK, clip_on=False, zorder=4, **marker(kind))
    thin_ticks(sheet, axes, table["length"])
    bytes_axis(axes.yaxis, "saved by one block (MiB)")
    note(axes, f"everything else,\nwith T: {mib(linear, 0)}", 1, linear / 2, 9, of="y", size=8.5)
    note(axes, f"probabilities and mask,\nwith T²: {mib(square, 0)}", 1, linear + square / 2, 9, of="y", size=8.5)
    marker_key(axes, kinds, 0.03, 0.95)
    return sheet.figure


def window(trace: Trace, step: int) -> tuple[int, int]:
    """First event of a step, and one past its last. ValueError if the trace has no such step."""
    inside = [i for i, event in enumerate(trace.events) if event.step == step and event.phase]
    if not inside:
        raise ValueError(f"the trace has no step {step}")
    return inside[0], inside[-1] + 1


def allocated(trace: Trace) -> list[int]:
    """`memory_allocated()` after each event, also where blocks are older than the trace: its marks know of them."""
    curve = trace.allocated_bytes()
    mark = next((mark for mark in trace.marks if mark.event_count), None)
    older = mark.allocated_bytes - curve[mark.event_count - 1] if mark else 0
    return [size + older for size in curve]


def blind_spot(trace: Trace, readings: Sequence[Mark], step: int) -> tuple[int, int]:
    """Event counts of the readings just before and just after the peak of a step."""
    peak, (first, past) = trace.peak({step}), window(trace, step)
    counts = [reading.event_count for reading in readings]
    return (max((count for count in counts if first <= count <= peak), default=first),
            min((count for count in counts if peak < count <= past), default=past))


def asked(event: Event) -> str:
    """Who asked for how much: `log-softmax backward asks for 1,570.5 MiB`."""
    name = event.operator.removeprefix("aten.").strip("_").removesuffix("_data").replace("_", " ")
    name = name.replace("log softmax", "log-softmax") or event.module or "an operator without a name"
    return f"{name} asks for {mib(event.requested_bytes)}"


def _bars(axes, x, stacks: pd.DataFrame, width: float) -> None:
    floor = np.zeros(len(stacks))
    for category in Category:
        if category.value in stacks:
            heights = stacks[category.value].to_numpy()
            axes.bar(x, heights, width, floor, color=colour(category), linewidth=0)
            floor = floor + heights


def _shares(kept: pd.Series) -> str:
    """`54% activations, 37% loss, 9% everything else`."""
    first, second = (kept / kept.sum()).nlargest(2).items()
    rest = 1 - first[1] - second[1]
    return f"{first[1]:.0%} {first[0]}, {second[1]:.0%} {second[0]}, {rest:.0%} everything else"
