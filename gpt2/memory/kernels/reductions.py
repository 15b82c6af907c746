"""Operators that reduce: which accumulator each keeps, and what it copies first.

All go through gpu_reduce_kernel (Reduce.cuh); `gpt2/memory/kernels/reduction.py` has its arithmetic.
"""

from __future__ import annotations

import torch

from gpt2.memory.kernels import reduction, shapes
from gpt2.memory.kernels.scratch import Temporaries, reduction_scratch, rule

aten = torch.ops.aten
WELFORD = 16  # WelfordData<float, int32_t, float>: mean, squared distance, count, count as a float
VALUE_AND_PLACE = 16  # a value of up to 8 bytes and an int64 index, aligned


def _dims(args, place: int = 1):
    return args[place] if len(args) > place and isinstance(args[place], list | tuple | int) else None


@rule(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.prod.default, aten.prod.dim_int)
def total(tracker, func, args, kwargs):
    """The input is cast first, except 16 bit to fp32, which the kernel does. ReduceOpsUtils.h, make_reduction."""
    source, card = args[0], tracker.card
    out = tracker.outputs(shapes.call(func, args, kwargs))
    read = out.dtype
    if source.dtype in (torch.float16, torch.bfloat16) and out.dtype is torch.float32:
        read = source.dtype
    with Temporaries(card, "reduction: cast of the input") as temporaries:
        itemsize = out.element_size()
        if read is source.dtype:
            itemsize = source.element_size()
        else:
            temporaries.take(source.numel() * itemsize)
        vector = card.software.reduce_vector_16bit if itemsize == 2 else reduction.VECTOR
        reduction_scratch(card, source, _dims(args), accumulator=max(4, itemsize), vector=vector)
    return out


@rule(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def extreme(tracker, func, args, kwargs):
    """Kept in the input's own type. ReduceMaxValuesKernel.cu."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    reduction_scratch(tracker.card, args[0], _dims(args), accumulator=args[0].element_size())
    return out


@rule(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)
def extreme_and_place(tracker, func, args, kwargs):
    """Pairs of value and index. ReduceMaxValuesKernel.cu, ReduceArgMaxKernel.cu."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    reduction_scratch(tracker.card, args[0], _dims(args), accumulator=VALUE_AND_PLACE)
    return out


@rule(aten.any.default, aten.any.dim, aten.all.default, aten.all.dim)
def truth(tracker, func, args, kwargs):
    """One byte. ReduceLogicKernel.cu."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    reduction_scratch(tracker.card, args[0], _dims(args), accumulator=1)
    return out


@rule(aten.linalg_vector_norm.default)
def norm(tracker, func, args, kwargs):
    """fp32 for everything up to 32 bits. ReduceNormKernel.cu."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    reduction_scratch(tracker.card, args[0], _dims(args, 2))
    return out


@rule(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def moments(tracker, func, args, kwargs):
    """Welford's mean, distance and two counts; two values at a time. ReduceMomentKernel.cu, std_var_kernel_impl."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    reduction_scratch(tracker.card, args[0], _dims(args), accumulator=WELFORD, vector=2)
    return out


@rule(aten.logsumexp.default)
def logsumexp(tracker, func, args, kwargs):
    """The maxima, a mask of infinite ones, the exponentials, then the output as their sum.

    ReduceOps.cpp, logsumexp_out_impl.
    """
    source, dims, card = args[0], args[1], tracker.card
    out = shapes.call(func, args, kwargs)
    size, count = source.element_size(), out.numel()
    with Temporaries(card, "logsumexp: maxima and exponentials") as temporaries:
        temporaries.take(count * size)
        reduction_scratch(card, source, dims, accumulator=size)
        absolute = temporaries.take(count * size)
        infinite = temporaries.take(count)
        temporaries.give(infinite)
        temporaries.give(absolute)
        temporaries.take(source.numel() * size)
        tracker.outputs(out)
        vector = card.software.reduce_vector_16bit if size == 2 else reduction.VECTOR
        reduction_scratch(card, source, dims, vector=vector)
    return out
