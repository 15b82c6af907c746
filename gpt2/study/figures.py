"""Every figure of the study under one name: `figures.step_by_owner(...)`. Tables and traces in, a matplotlib Figure out.

`alt(figure)` is what the figure says in words, `conditions(trace, recipe)` its subtitle.
"""

from gpt2.study.drawing import alt, conditions
from gpt2.study.figures_step import allocator_trace, growth, mountain, saved_tensors, staircase, step_by_owner

__all__ = ["allocator_trace", "alt", "conditions", "growth", "mountain", "saved_tensors", "staircase", "step_by_owner"]
