"""Backward formulas that work in place on a real tensor and out of place under a dispatch mode.

Where a formula might meet a tensor subclass, PyTorch asks areAnyTensorSubclassLike, which says yes under any dispatch
mode and for meta tensors, and takes the out-of-place form. Here the real form is put back. Each line of the table is
one such place in torch/csrc/autograd/FunctionsManual.cpp: the node, and which of its operators are in place there.
Under create_graph the real form is out of place, too.
"""

from __future__ import annotations

import torch

from gpt2.memory.kernels import shapes
from gpt2.memory.kernels.scratch import RULES

aten = torch.ops.aten
_in_backward = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node

# value_selecting_reduction_backward: a zero tensor, the gradient scattered into it
SELECTING = ("Max", "Min", "Sort", "Topk", "Kthvalue", "Median", "Nanmedian", "Mode", "Cummax", "Cummin")
IN_PLACE = {
    aten.scatter.src: (aten.scatter_.src, SELECTING),
    aten.scatter_add.default: (aten.scatter_add_.default, ("Gather", "Cummax", "Cummin")),
    aten.index_add.default: (aten.index_add_.default, ("IndexSelect",)),
    aten.index_put.default: (aten.index_put_.default, ("Index",)),
    aten.sub.Tensor: (aten.sub_.Tensor, ("BinaryCrossEntropyWithLogits",)),
    aten.mul.Tensor: (aten.mul_.Tensor, ("BinaryCrossEntropyWithLogits",)),
}


def _formula() -> str:
    """The operator whose backward is running: "Gather" of GatherBackward0."""
    node = _node()
    return node.name().partition("Backward")[0] if node is not None else ""


def _rule(in_place, formulas, otherwise):
    def rule(tracker, func, args, kwargs):
        if _in_backward() != -1 and not torch.is_grad_enabled() and _formula() in formulas:
            func = in_place
            inner = RULES.get(func)
            return inner(tracker, func, args, kwargs) if inner else func(*args, **kwargs)
        if otherwise is not None:
            return otherwise(tracker, func, args, kwargs)
        return tracker.outputs(shapes.call(func, args, kwargs))

    return rule


def wrap() -> None:
    """Put these rules before those that are registered."""
    for func, (twin, formulas) in IN_PLACE.items():
        RULES[func] = _rule(twin, frozenset(formulas), RULES.get(func))
