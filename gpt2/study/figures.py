"""Every figure of the study under one name, `figures.step_by_owner(...)`: tables and traces in, a Figure out.

`alt(figure)` is what the figure says in words, `conditions(trace, recipe)` its subtitle.
"""

from gpt2.study.drawing import alt, conditions
from gpt2.study.figures_batch import batch_sweep, fragmentation
from gpt2.study.figures_savings import crossovers, estimate, frontier, ladder, waterfall
from gpt2.study.figures_segments import segment_map, segments_before
from gpt2.study.figures_step import (
    allocator_trace,
    blind_spot,
    growth,
    mountain,
    saved_tensors,
    staircase,
    step_by_owner,
)
from gpt2.study.figures_time import copies, kernel_timeline, optimizers

__all__ = ["allocator_trace", "alt", "batch_sweep", "blind_spot", "conditions", "copies", "crossovers",
           "estimate", "fragmentation", "frontier", "growth", "kernel_timeline", "ladder", "mountain", "optimizers",
           "saved_tensors", "segment_map", "segments_before", "staircase", "step_by_owner", "waterfall"]
