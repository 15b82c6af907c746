"""Stills of the calculator and of the guess form, for those who read without a kernel."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gpt2.memory.trace import Category
from gpt2.study.figures.drawing import Sheet, bytes_axis, drawn
from gpt2.study.figures.labels import note
from gpt2.study.interactive.calculator import Answer
from gpt2.study.interactive.closed_form import Setting
from gpt2.study.palette import ALARM, CACHED, CACHED_EDGE, FAINT, MUTED, colour, ink_on, mib


@drawn
def calculator_still(setting: Setting, gpu: str, answer: Answer, exact: Answer | None) -> Figure:
    """What the calculator shows before anybody touches it."""
    best = exact or answer
    verdict = "fits" if best.fits else "does not fit"
    title = f"Batch {setting.batch} x {setting.length:,} {verdict}: {mib(best.allocated_bytes, 0)} at the peak"
    subtitle = (f"{setting.layers} layers of width {setting.width:,}, {setting.precision}, {setting.attention} "
                f"attention, checkpoint {setting.checkpoint}, {setting.loss} loss, AdamW {setting.optimizer} · "
                f"predicted for {gpu}")
    sheet = Sheet(title, subtitle, width=9, height=2.1,
                  says=f"{mib(best.reserved_bytes, 0)} reserved, {mib(best.capacity_bytes, 0)} free on the card; by "
                       f"formula {mib(answer.allocated_bytes, 0)}, and the largest batch is {answer.largest_batch}.")
    rows = [row for row in (("exact", exact), ("by formula", answer)) if row[1] is not None]
    axes = sheet.axes(0.95, 0.46, 0.3, 0.32)
    axes.set(xlim=(0, 1.06 * max(best.capacity_bytes, best.reserved_bytes, answer.reserved_bytes)), ylim=(1.55, -0.55))
    scale = axes.get_position().width * sheet.width / axes.get_xlim()[1]
    for y, (_, found) in enumerate(rows):
        axes.barh(y, found.reserved_bytes, 0.62, color=CACHED, edgecolor=CACHED_EDGE)
        left = 0
        for category in Category:
            size = found.owners.get(category, 0)
            axes.barh(y, size, 0.62, left, color=colour(category), linewidth=0)
            if size * scale > sheet.text_inches(category.value, 7.5) + 0.08:
                note(axes, category.value, left + size / 2, y, ha="center", size=7.5, halo=False,
                     color=ink_on(colour(category)))
            left += size
        spare = (found.reserved_bytes - found.allocated_bytes) * scale
        if spare > sheet.text_inches("reserved", 7.5) + 0.08:
            middle = (found.reserved_bytes + found.allocated_bytes) / 2
            note(axes, "reserved", middle, y, ha="center", size=7.5, halo=False)
    axes.axvline(best.capacity_bytes, color=ALARM, linewidth=1.4)
    at = best.capacity_bytes / axes.get_xlim()[1]
    note(axes, f"free on the card: {mib(best.capacity_bytes, 0)}", at, 1, 0, 5, of="axes", va="bottom",
         ha="right" if at > 0.5 else "left", color=ALARM)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], size=8.5)
    axes.tick_params(axis="y", length=0)
    bytes_axis(axes.xaxis, "peak memory (MiB)")
    return sheet.figure


@drawn
def guess_still(questions: Mapping[str, tuple]) -> Figure:
    """The questions, each with room for an answer."""
    sheet = Sheet("Four guesses to write down before you look", "in a running notebook this is a form that keeps them",
                  width=8.4, height=0.3 + 0.34 * len(questions),
                  says="The questions: " + " ".join(question for question, *_ in questions.values()))
    for row, (question, unit, _) in enumerate(questions.values()):
        y = sheet.below - 0.28 - 0.34 * row
        sheet.write(0.16, y, f"{row + 1}.  {question}")
        sheet.write(3.7, y, unit if isinstance(unit, str) else " · ".join(unit), color=MUTED, size=7.5)
        rule = [0.16 / sheet.width, 1 - 0.16 / sheet.width], [(y - 0.09) / sheet.height] * 2
        sheet.figure.add_artist(Line2D(*rule, color=FAINT, linewidth=0.7))
    return sheet.figure
