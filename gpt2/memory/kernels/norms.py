"""Normalisations: layer, RMS, group and batch norm. Shape letters: N batch, C channels, G groups."""

from __future__ import annotations

import math

import torch

from gpt2.memory.kernels import shapes
from gpt2.memory.kernels.scratch import Temporaries, reduction_scratch, rule

aten = torch.ops.aten
THREADS = 512  # MAX_BLOCK_SIZE of Normalization.cuh
ROWS_A_THREAD = 16  # ELEMENTS_PER_THREAD there


def _partial_sums(card, rows: int, columns: int) -> int:
    """Rows of partial sums that the gradient of weight and bias is split into; 0 if it is not split.

    layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: more than 65,536 rows and too few columns for the card.
    """
    if card.software.release < (2, 8) or rows <= 65_536 or columns // 32 >= card.gpu.sms // 2:
        return 0
    return min(math.ceil(rows / 32), 32_768 // math.ceil(columns / 32))


def weight_gradients(tracker, gradients, rows: int, columns: int) -> None:
    """The gradients of weight and, if there is one, bias: whole, or as partial sums and a reduction each."""
    card = tracker.card
    blocks = _partial_sums(card, rows, columns)
    if not blocks:
        tracker.outputs(gradients)
        return
    size = columns * gradients[0].element_size()
    with Temporaries(card, "norm backward: partial sums") as temporaries:
        replaced = [temporaries.take(size) for _ in gradients]
        for _ in gradients:
            temporaries.take(blocks * size)
        partial = torch.empty(blocks, columns, dtype=gradients[0].dtype, device="meta")
        for gradient, old in zip(gradients, replaced, strict=True):
            tracker.outputs(gradient)
            reduction_scratch(card, partial, [0])
            temporaries.give(old)


@rule(aten.native_layer_norm.default)
def layer_norm(tracker, func, args, kwargs):
    """Output, mean and rstd of a contiguous input. layer_norm_kernel.cu, layer_norm_cuda."""
    with Temporaries(tracker.card, "layer norm: contiguous input") as temporaries:
        temporaries.contiguous(args[0])
        return tracker.outputs(shapes.call(func, args, kwargs))


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(tracker, func, args, kwargs):
    """Gradients of input, weight and bias, then a contiguous gradient of the output if it is not.

    layer_norm_kernel.cu, layer_norm_backward_cuda and LayerNormBackwardKernelImplInternal.
    """
    grad, source, weight = args[0], args[1], args[5]
    columns = math.prod(args[2])
    out = shapes.call(func, args, kwargs)
    if out[0] is not None and not out[0].is_contiguous():  # the meta kernel follows the gradient's layout
        out = (torch.empty_like(out[0], memory_format=torch.contiguous_format), *out[1:])
    with Temporaries(tracker.card, "layer norm backward: contiguous input") as temporaries:
        temporaries.contiguous(source)
        tracker.outputs(out[0])
        if weight is not None:
            weight_gradients(tracker, out[1:], grad.numel() // columns, columns)
        temporaries.contiguous(grad)
    return out


@rule(aten.native_group_norm.default)
def group_norm(tracker, func, args, kwargs):
    """Output, mean, rstd; scale and shift of every channel, fp32. group_norm_kernel.cu, GroupNormKernelImplInternal."""
    weight, bias, N, C, inner = args[1], args[2], *args[3:6]
    out = tracker.outputs(shapes.call(func, args, kwargs))
    if inner > 1 and (weight is not None or bias is not None):
        with Temporaries(tracker.card, "group norm: scale and shift") as temporaries:
            temporaries.take(4 * N * C)
            temporaries.take(4 * N * C)
    return out


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(tracker, func, args, kwargs):
    """Sums of grad and grad * input of every channel, three factors. group_norm_kernel.cu, its backward."""
    weight, N, C, inner, G = args[4], *args[5:9]
    out = tracker.outputs(shapes.call(func, args, kwargs))
    if inner > 1:
        with Temporaries(tracker.card, "group norm backward: sums") as temporaries:
            sizes = [N * C, N * C]
            if out[0] is not None:
                sizes += [N * G, N * G] + ([N * C] if weight is not None else [])
            for count in sizes:
                temporaries.take(4 * count)
    return out


@rule(aten.native_batch_norm.default)
def batch_norm(tracker, func, args, kwargs):
    """Output, mean, rstd; for channels last what its blocks found. batch_norm_stats_channels_last_cuda_template."""
    source, training = args[0], args[5]
    out = tracker.outputs(shapes.call(func, args, kwargs))
    if training and _channels_last(source):
        with Temporaries(tracker.card, "batch norm: statistics") as temporaries:
            _staging(temporaries, source, 4)
    return out


@rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(tracker, func, args, kwargs):
    """Channels last, as any (N, C) input is: two sums and the weights' gradients come before the input's.

    Normalization.cu, batch_norm_backward_cuda; .cuh, batch_norm_backward_reduce_cuda_channels_last_template.
    """
    grad, source, weight = args[:3]
    out = shapes.call(func, args, kwargs)
    if not args[7] or not (_channels_last(source) and _channels_last(grad)) or weight is None:
        return tracker.outputs(out)
    with Temporaries(tracker.card, "batch norm backward: sums") as temporaries:
        temporaries.take(4 * source.shape[1])
        temporaries.take(4 * source.shape[1])
        tracker.outputs(out[1:])
        _staging(temporaries, source, 2)
        tracker.outputs(out[0])
    return out


def _channels_last(x: torch.Tensor) -> bool:
    """Normalization.cuh, batch_norm_use_channels_last_kernels; not cuDNN's, which are not known here."""
    if x.dim() == 2:
        return x.is_contiguous()
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return last and x.dtype is torch.bfloat16


def _staging(temporaries: Temporaries, source: torch.Tensor, numbers: int) -> None:
    """So many numbers a channel from every block, if rows are split over blocks. flexible_launch_configs."""
    C = source.shape[1]
    N = source.numel() // C
    width = min(_floor_power2(C), 32)
    height = min(_floor_power2(-(-N // ROWS_A_THREAD)), THREADS // width)
    width = min(_floor_power2(C), THREADS // height)
    blocks = min(-(-N // (height * ROWS_A_THREAD)), 128)
    if blocks >= 8:
        staging = temporaries.take(numbers * C * blocks * 4)
        temporaries.give(temporaries.take(4 * -(-C // width)))
        temporaries.give(staging)


def _floor_power2(n: int) -> int:
    return 1 << (n.bit_length() - 1)
