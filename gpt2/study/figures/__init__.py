"""Every figure of the study under one name, `figures.step_by_owner(...)`: tables and traces in, a Figure out.

`alt(figure)` is what the figure says in words, `conditions(trace, recipe)` its subtitle.
"""

from gpt2.study.figures.batch import batch_sweep, fragmentation
from gpt2.study.figures.drawing import alt, conditions
from gpt2.study.figures.failures import growth_by_habit, reserved_by_run
from gpt2.study.figures.savings import crossovers, estimate, frontier, ladder, waterfall
from gpt2.study.figures.segments import segment_map, segments_before
from gpt2.study.figures.step import (
    allocator_trace,
    blind_spot,
    growth,
    mountain,
    saved_tensors,
    staircase,
    step_by_owner,
)
from gpt2.study.figures.stream import by_kind, late_loader, lead, rates, waiting
from gpt2.study.figures.time import copies, kernel_timeline, optimizers

__all__ = ["allocator_trace", "alt", "batch_sweep", "blind_spot", "by_kind", "conditions", "copies", "crossovers",
           "estimate", "fragmentation", "frontier", "growth", "growth_by_habit", "kernel_timeline", "ladder",
           "late_loader", "lead", "mountain", "optimizers", "rates", "reserved_by_run", "saved_tensors",
           "segment_map", "segments_before", "staircase", "step_by_owner", "waiting", "waterfall"]
