"""Losses that are one operator: what they hold besides a number."""

from __future__ import annotations

import torch

from gpt2.memory.kernels import shapes
from gpt2.memory.kernels.scratch import Temporaries, reduction_scratch, rule

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


def _reduce(card, elements, reduction: int) -> None:
    """The scratch of a mean or sum over all `elements`."""
    if reduction != NONE:
        vector = card.software.reduce_vector_16bit if elements.element_size() == 2 else 4
        reduction_scratch(card, elements, None, vector=vector)


@rule(aten.mse_loss.default, aten.smooth_l1_loss.default)
def structured(tracker, func, args, kwargs):
    """The number lives in a block as large as the input: the output is made for every element, then shrunk.

    Loss.cpp, mse_loss and smooth_l1_loss: the meta function makes the output as for reduction "none"; the kernel fills
    a second tensor and reduces it into the first, whose storage stays.
    """
    out = shapes.call(func, args, kwargs)
    reduction = args[2] if len(args) > 2 else MEAN
    if reduction == NONE:
        return tracker.outputs(out)
    elements = torch.empty(torch.broadcast_shapes(args[0].shape, args[1].shape), dtype=out.dtype, device="meta")
    loss = tracker.outputs(torch.empty_like(elements))
    with Temporaries(tracker.card, "loss of every element") as temporaries:
        temporaries.take(elements.numel() * elements.element_size())
        _reduce(tracker.card, elements, reduction)
    return aten.resize_.default(loss, ())


@rule(aten.huber_loss.default)
def huber(tracker, func, args, kwargs):
    """Every element's loss, then its mean. Loss.cpp, huber_loss."""
    out = shapes.call(func, args, kwargs)
    reduction = args[2] if len(args) > 2 else MEAN
    if reduction == NONE:
        return tracker.outputs(out)
    elements = torch.empty(torch.broadcast_shapes(args[0].shape, args[1].shape), dtype=out.dtype, device="meta")
    with Temporaries(tracker.card, "loss of every element") as temporaries:
        temporaries.take(elements.numel() * elements.element_size())
        tracker.outputs(out)
        _reduce(tracker.card, elements, reduction)
    return out


@rule(aten.binary_cross_entropy_with_logits.default)
def bce_with_logits(tracker, func, args, kwargs):
    """log-sigmoid of the input, then the loss of every element, then its mean. Loss.cpp, the function of that name."""
    source, target = args[:2]
    positive = args[3] if len(args) > 3 else None
    reduction = args[4] if len(args) > 4 else MEAN
    out = shapes.call(func, args, kwargs)
    size = source.element_size()
    with Temporaries(tracker.card, "loss of every element") as temporaries:
        temporaries.take(source.numel() * size)
        if positive is not None:
            less = temporaries.take(positive.numel() * size)
            scaled = temporaries.take(target.numel() * size)
            temporaries.give(less)
            temporaries.give(scaled)
        if reduction == NONE:
            return tracker.outputs(out)
        temporaries.take(target.numel() * size)
        tracker.outputs(out)
        _reduce(tracker.card, target, reduction)
    return out
