"""Convolutions by cuDNN: outputs exactly, workspaces by the one rule that can be derived.

cuDNN picks an algorithm by a heuristic that is not published. Its tensor-core kernels want channels last; for tensors
that are channels first it converts input, weight and output in its workspace. That is the rule here: the bytes of the
three, channels padded to 8 in 16 bit, plus 16. On an H200 with cuDNN 9.19 it gives most forward and input-gradient
workspaces to the byte (results/measured/h200/kernel-probes.json); split-K partial sums of weight gradients, and the
kernels that write channels first directly, are not modelled, so a convolution net is off by a few per cent of its peak.
"""

from __future__ import annotations

import torch

from gpt2.memory import shapes
from gpt2.memory.scratch import Temporaries, reduction_scratch, rule

aten = torch.ops.aten
_KERNEL = 16  # bytes besides the converted tensors, as recorded


def _converted(tensor: torch.Tensor, channels: bool) -> int:
    """Bytes of `tensor` (N, C, ...) in channels-last form; 16-bit kernels want 8 channels or more."""
    count = tensor.numel()
    if channels and tensor.element_size() == 2 and tensor.shape[1] < 8:
        count = count // tensor.shape[1] * 8
    return count * tensor.element_size()


def workspace(source: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, groups: int) -> int:
    """Bytes of cuDNN's workspace for one of the three passes over these tensors."""
    if source.dim() != 4 or groups != 1 or source.is_contiguous(memory_format=torch.channels_last):
        return 0
    if source.element_size() == 4 and (
        source.shape[1] < 8 and weight.shape[2] != 7 or not torch.backends.cudnn.allow_tf32
    ):
        return 0
    pointwise = weight.shape[2] == weight.shape[3] == 1
    return _converted(source, True) + (0 if pointwise else _converted(weight, True)) + _converted(out, False) + _KERNEL


@rule(aten.convolution.default, aten.cudnn_convolution.default)
def forward(tracker, func, args, kwargs):
    """Output, then the workspace. native/cudnn/ConvShared.cpp; the bias is added in place."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    with Temporaries(tracker.card, "cuDNN convolution workspace") as temporaries:
        temporaries.take(workspace(args[0], args[1], out, args[-1] if isinstance(args[-1], int) else 1))
    return out


@rule(aten.convolution_backward.default)
def backward(tracker, func, args, kwargs):
    """Gradients of input, weight and bias, each after the other with its workspace. Convolution.cpp, ConvShared.cpp."""
    grad, source, weight = args[:3]
    groups = args[9] if len(args) > 9 else 1
    out = shapes.call(func, args, kwargs)
    dense = grad.is_contiguous() or grad.is_contiguous(memory_format=torch.channels_last)
    for gradient in out[:2]:
        if gradient is not None:
            with Temporaries(tracker.card, "cuDNN convolution workspace") as temporaries:
                copy = 0 if dense else temporaries.take(grad.numel() * grad.element_size())
                tracker.outputs(gradient)
                workspace_at = temporaries.take(workspace(source, weight, grad, groups))
                temporaries.give(copy)
                temporaries.give(workspace_at)
    if out[2] is not None:
        tracker.outputs(out[2])
        dims = [0, *range(2, grad.dim())]
        reduction_scratch(tracker.card, grad, dims)
    return out
