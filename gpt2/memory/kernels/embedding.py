"""Embeddings and rolling: sorted copies of the indices, sums by segment."""

from __future__ import annotations

import math

import torch

from gpt2.memory.kernels import cub, shapes
from gpt2.memory.kernels.scratch import Temporaries, rule

aten = torch.ops.aten
EMBEDDING_SORT_FROM = 3_072  # indices above which embedding backward sorts: Embedding.cu
ROWS_A_PARTIAL = 10  # NROWS_PER_THREAD, EmbeddingBackwardKernel.cu
FUSED_BLOCKS_AN_SM = 4  # MAX_ATOMIC_ACCUM_BLOCKS_PER_SM, there


@rule(aten.embedding.default)
def embedding(tracker, func, args, kwargs):
    """Indices that are not contiguous are copied first. Embedding.cpp: index_select(indices.reshape(-1))."""
    indices = args[1]
    with Temporaries(tracker.card, "embedding: contiguous indices") as temporaries:
        temporaries.contiguous(indices)
        return tracker.outputs(shapes.call(func, args, kwargs))


def _adds_atomically(card, segments: int, partials: int, width: int) -> bool:
    """Whether partial sums go straight into the gradient: few rows are hit, and each often.

    EmbeddingBackwardKernel.cu, use_fused_kernel, from 2.11: too few blocks would add up the partial sums.
    """
    warped = math.ceil(width / 32) * 32
    blocks = math.ceil(segments * warped / min(warped, 1024))
    busy = card.gpu.sms * FUSED_BLOCKS_AN_SM
    return (
        card.software.release >= (2, 11)
        and blocks < busy
        and partials > 4 * blocks
        and not torch.are_deterministic_algorithms_enabled()
    )


@rule(aten.embedding_dense_backward.default)
def embedding_backward(tracker, func, args, kwargs):
    """Many indices are sorted and summed by segment. Embedding.cu and EmbeddingBackwardKernel.cu."""
    grad, indices, rows = args[0], args[1], args[2]
    by_frequency = args[4] if len(args) > 4 else False
    n, width, card = indices.numel(), grad.shape[-1], tracker.card
    size = indices.element_size()
    with Temporaries(card, "embedding backward: sort") as temporaries:
        take, give = temporaries.take, temporaries.give
        temporaries.contiguous(indices)
        temporaries.contiguous(grad)
        if n <= EMBEDDING_SORT_FROM and not by_frequency:
            return tracker.outputs(shapes.call(func, args, kwargs))
        take(size * n)  # sorted indices
        take(size * n)  # where they came from
        counting = take(size * n)
        give(take(cub.radix_sort(n, card.gpu.capability, key=size, value=size)))
        give(counting)
        out = tracker.outputs(shapes.call(func, args, kwargs))
        segments = min(n, rows)
        partials = n // ROWS_A_PARTIAL + segments  # at most: one per 10 indices and one per row
        take(size * n)  # where each row's run begins
        take(8)  # how many runs
        keys = take(size * n)
        give(take(cub.unique_by_key(n, card.gpu.capability)))
        give(keys)
        take(size * segments)  # partial sums per run
        take(size * segments)  # and where they begin
        give(take(cub.scan(segments, size)))
        take(8)
        take(size * partials)
        if _adds_atomically(card, segments, partials, width):
            take(size * partials)  # which run each belongs to
            if grad.element_size() == 2:
                take(4 * rows * width)  # the gradient in fp32
        else:
            take(4 * partials * width)  # the partial sums, fp32
        return out


@rule(aten.roll.default)
def roll(tracker, func, args, kwargs):
    """One dimension after the other, each into a new tensor. TensorTransformations.h, roll_common."""
    source, dims = args[0], (args[2] if len(args) > 2 else [])
    out = shapes.call(func, args, kwargs)
    with Temporaries(tracker.card, "roll: dimensions before the last") as temporaries:
        before = 0
        for _ in dims[:-1]:
            rolled = temporaries.take(source.numel() * source.element_size())
            temporaries.give(before)
            before = rolled
        return tracker.outputs(out)
