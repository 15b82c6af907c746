"""Depthwise convolutions that PyTorch computes with kernels of its own: no workspace, and another order.

Convolution.cpp (is_depthwise, use_cudnn_depthwise, check_cudnn_depthwise_workload_with_filter), DepthwiseConv2d.cu:
a filter or some for each channel, channels first. cuDNN gets the channels-last ones, and in fp16 those for which
PyTorch holds it to be faster. In backward the weight's gradient comes before the input's.
"""

from __future__ import annotations

import torch

from gpt2.memory.kernels import shapes
from gpt2.memory.kernels.scratch import Temporaries, reduction_scratch


def native(source: torch.Tensor, weight: torch.Tensor, args) -> bool:
    """Whether a channels-first convolution is one; `args`: (stride, padding, dilation, transposed, ..., groups)."""
    stride, _, dilation, transposed, _, groups = args
    channels, filters = source.shape[1], weight.shape[0]
    if source.dim() > 4 or transposed or not 1 < groups == channels or filters % channels:
        return False
    return source.dtype is not torch.float16 or any(d > 1 for d in dilation) or not _faster(source, weight, stride)


def _faster(source: torch.Tensor, weight: torch.Tensor, stride) -> bool:
    """Whether cuDNN is taken to be the faster one for this in fp16."""
    images, channels, *_, across = source.shape
    flat = source.dim() == 3 or source.shape[2] == 1
    down, kernel = weight.shape[2] if weight.dim() == 4 else 1, weight.shape[-1]
    if channels < 32 or not (flat or stride[0] == stride[-1]):
        return False
    if flat and stride[-1] == 1:
        return True
    if down != kernel or kernel not in (1, 3, 5) or across < 7 or stride[-1] > 2:
        return False
    if stride[-1] == 1:
        return True
    if kernel == 1:
        return across <= 28 if images == 1 else images <= 16 and channels >= 128 and across <= 7
    return images == 1 or channels >= 512 or (channels >= 256 and across >= 28)


def forward(tracker, func, args, kwargs) -> torch.Tensor:
    """Contiguous copies of input and weight where they are none, and the output."""
    source, weight = args[:2]
    with Temporaries(tracker.card, "depthwise convolution: contiguous copies") as temporaries:
        for tensor in (source, weight):
            temporaries.contiguous(tensor)
        out = shapes.call(func, args, kwargs)
        tracker.outputs(out)
    return out


def backward(tracker, func, args, kwargs) -> tuple:
    """The weight's gradient, then the input's, then the bias's; a copy of a 1-d input is there until the end."""
    grad, source, weight = args[:3]
    out = shapes.call(func, args, kwargs)
    with Temporaries(tracker.card, "depthwise convolution: contiguous copies") as outer:
        if source.dim() == 3:
            outer.contiguous(source)
        with Temporaries(tracker.card, "depthwise convolution: contiguous copies") as temporaries:
            temporaries.contiguous(grad)
            for gradient, operand in ((out[1], source), (out[0], weight)):
                if gradient is None:
                    continue
                copy = 0 if operand is source and source.dim() == 3 else temporaries.contiguous(operand)
                tracker.outputs(gradient)
                temporaries.give(copy)
        if out[2] is not None:
            tracker.outputs(out[2])
            reduction_scratch(tracker.card, grad, [0, *range(2, grad.dim())])
    return out
