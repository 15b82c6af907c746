"""Composite operators that take another way for meta tensors than on a card: linear, one_hot, rms_norm, recurrent.

Each path is a kernel above autograd's own, as in `gpt2/memory/operators/attention.py`.
"""

from __future__ import annotations

import math

import torch

from gpt2.memory.faces.face import hosting
from gpt2.memory.kernels.norms import weight_gradients
from gpt2.memory.operators import recurrent

aten = torch.ops.aten


def _linear(x, weight, bias=None):
    """Linear.cpp: a bias is added in place after the product if the input cannot be flattened without a copy."""
    if bias is None or x.dim() == 2 or x.is_contiguous():
        return aten.linear.default.decompose(x, weight, bias)
    return torch.matmul(x, weight.t()).add_(bias)


def _one_hot(classes, num_classes=-1):
    """Onehot.cpp: zeros, and ones scattered into them; meta tensors compare with an arange instead."""
    if num_classes == -1:
        num_classes = int(classes.max()) + 1
    return classes.new_zeros((*classes.shape, num_classes)).scatter_(-1, classes.unsqueeze(-1), 1)


def _fused_rms_norm(card):
    class RmsNorm(torch.autograd.Function):
        """layer_norm_kernel.cu, _fused_rms_norm_cuda: output and fp32 rstd; backward as layer norm's, without bias."""

        @staticmethod
        def forward(ctx, x, weight, columns):
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            rstd = x.new_empty(x.numel() // columns, dtype=torch.float32)
            ctx.save_for_backward(x, weight, rstd)
            ctx.columns = columns
            return out

        @staticmethod
        def backward(ctx, grad):
            x, weight, rstd = ctx.saved_tensors
            dx = torch.empty_like(x)
            dw = None
            if weight is not None:
                with hosting(card.tracker):
                    dw = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                weight_gradients(card.tracker, [dw], x.numel() // ctx.columns, ctx.columns)
            return dx, dw, None

    return RmsNorm


def _rms_norm(card):
    function = _fused_rms_norm(card)

    def rms_norm(x, normalized_shape, weight=None, eps=None):
        """layer_norm.cpp, rms_norm: one kernel since 2.9, unless the weight is of another type."""
        if card.software.release < (2, 9) or (weight is not None and weight.dtype is not x.dtype) or not x.numel():
            return aten.rms_norm.default.decompose(x, normalized_shape, weight, eps)
        return function.apply(x, weight, math.prod(normalized_shape))

    return rms_norm


def paths(card) -> dict:
    """Name of the operator and the card's way of doing it."""
    return {"linear": _linear, "one_hot": _one_hot, "rms_norm": _rms_norm(card), **recurrent.paths(card)}
