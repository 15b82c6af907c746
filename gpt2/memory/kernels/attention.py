"""What the fused attention kernels allocate, forward and backward: outputs in their order, random state, workspaces.

Shape letters: B batch, H heads, S query length, K head width.
"""

from __future__ import annotations

import math

import torch

from gpt2.memory.gpus import Gpu
from gpt2.memory.kernels import shapes
from gpt2.memory.kernels.scratch import Temporaries, rule

aten = torch.ops.aten


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@rule(aten._scaled_dot_product_cudnn_attention.default)
def cudnn_forward(tracker, func, args, kwargs):
    """Seed and offset first, also without dropout; then output and statistics; 256 bytes of workspace. MHA.cpp."""
    out = shapes.call(func, args, kwargs)
    tracker.outputs((out[6], out[7], out[0], out[1]))
    with Temporaries(tracker.card, "cuDNN attention workspace") as temporaries:
        temporaries.take(256)
    return out


@rule(aten._scaled_dot_product_cudnn_attention_backward.default)
def cudnn_backward(tracker, func, args, kwargs):
    """Workspace: the fp32 accumulator of dQ, the row sums, 256 bytes; with shared keys also full-size dK and dV.

    Seen on an H200 with cuDNN 9.19 at 12 shapes (results/measured/h200/kernel-probes.json).
    """
    query, key, value = args[1:4]
    B, H, S, K = query.shape
    out = tracker.outputs(shapes.call(func, args, kwargs))
    size = B * H * S * K * 4 + B * H * S * 4 + 256
    if key.shape[1] != H:
        size += B * H * key.shape[2] * (K + value.shape[3]) * query.element_size()
    with Temporaries(tracker.card, "cuDNN attention workspace") as temporaries:
        temporaries.take(size)
    return out


def flash_splits(blocks: int, sms: int, key_blocks: int, most: int = 128) -> int:
    """flash_api.cpp, num_splits_heuristic: how many ways to split the keys so that the card is busy."""
    if blocks >= 0.8 * sms:
        return 1
    most = min(most, sms, key_blocks)
    efficiencies, best = [], 0.0
    for splits in range(1, most + 1):
        eligible = splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1))
        waves = blocks * splits / sms
        efficiency = waves / math.ceil(waves) if eligible else 0.0
        best = max(best, efficiency)
        efficiencies.append(efficiency)
    return next(i + 1 for i, e in enumerate(efficiencies) if e >= 0.85 * best)


@rule(aten._scaled_dot_product_flash_attention.default)
def flash_forward(tracker, func, args, kwargs):
    """Output, log-sum-exp, accumulators if the keys are split, random state on the GPU from 2.8. flash_api.cpp."""
    query, key = args[:2]
    dropout = args[3] if len(args) > 3 else 0.0
    card = tracker.card
    B, H, S, K = query.shape
    out = shapes.call(func, args, kwargs)
    tracker.outputs((out[0], out[1]))
    with Temporaries(card, "flash attention accumulators") as temporaries:
        block = 256 if K <= 64 else 128 if K <= 128 else 64
        splits = flash_splits(B * H * -(-S // 64), 2 * card.gpu.sms, -(-key.shape[2] // block)) if not dropout else 1
        if splits > 1:
            temporaries.take(splits * B * H * S * 4)
            temporaries.take(splits * B * H * S * _up(K, 32) * 4)
        if card.software.flash_random_state_on_gpu:
            tracker.outputs((out[6], out[7]))
    return out


@rule(aten._scaled_dot_product_flash_attention_backward.default)
def flash_backward(tracker, func, args, kwargs):
    """Contiguous gradient and output, the three gradients, row sums, the fp32 accumulator of dQ. flash_api.cpp."""
    grad, query, key, value, output = args[:5]
    B, H, S, K = query.shape
    with Temporaries(tracker.card, "flash attention backward") as temporaries:
        for tensor in (grad, output):  # as [B, S, H, K]
            temporaries.contiguous(tensor.transpose(1, 2))
        out = tracker.outputs(shapes.call(func, args, kwargs))
        rows = _up(S, 128)
        temporaries.take(B * H * rows * 4)
        temporaries.take(B * rows * H * _up(K, 32 if K <= 128 else 64) * 4)
        if key.shape[1] != H:
            for tensor in (key, value):
                temporaries.take(B * H * tensor.shape[2] * tensor.shape[3] * tensor.element_size())
    return out


@rule(aten._scaled_dot_product_efficient_attention.default)
def efficient_forward(tracker, func, args, kwargs):
    """Output and padded log-sum-exp; the random state lives on the host; an fp32 accumulator for wide 16-bit heads.

    attention.cu and kernel_forward.h: the output is accumulated in registers up to a head width of 128 (64 keys).
    """
    query, value = args[0], args[2]
    out = shapes.call(func, args, kwargs)
    tracker.outputs((out[0], out[1]))
    if query.element_size() < 4 and value.shape[-1] > 128:
        with Temporaries(tracker.card, "efficient attention accumulator") as temporaries:
            temporaries.take(out[0].numel() * 4)
    return out


def efficient_workspace(B: int, H: int, S: int, K: int, itemsize: int, gpu: Gpu) -> int:
    """Bytes of dQ tiles: one per block of queries and 128 columns, each with four counters. kernel_backward.h."""
    columns = 64 if K <= 64 else 128
    rows = 128 if itemsize == 2 and 64 < K <= 128 and gpu.capability in ((8, 0), (9, 0)) else 64
    tiles = -(-S // rows) * -(-K // columns)
    return B * H * tiles * (rows * columns + 4) * 4


@rule(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_backward(tracker, func, args, kwargs):
    """The three gradients, grad * output summed over K (by separate operators in fp32), the workspace.

    attention_backward.cu, _efficient_attention_backward; sizes seen on an H200 at 10 shapes.
    """
    grad, query, key, value = args[:4]
    B, H, S, K = query.shape
    with Temporaries(tracker.card, "efficient attention backward") as temporaries:
        temporaries.contiguous(grad.transpose(1, 2))
        out = tracker.outputs(shapes.call(func, args, kwargs))
        delta = B * H * S * 4
        if query.element_size() == 4:
            product = temporaries.take(grad.numel() * 4)
            summed = temporaries.take(delta)
            temporaries.take(delta)
            temporaries.give(summed)
            temporaries.give(product)
        else:
            temporaries.take(delta)
        workspace = temporaries.take(efficient_workspace(B, H, S, K, query.element_size(), tracker.card.gpu))
        first = temporaries.held[-2]
        temporaries.give(first)
        temporaries.give(workspace)
    return out
