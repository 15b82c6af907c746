"""Sorting, top-k, running sums, permutations and draws."""

from __future__ import annotations

import math

import torch

from gpt2.memory.kernels import cub, shapes
from gpt2.memory.kernels.scratch import Temporaries, rule

aten = torch.ops.aten


def _slices(tensor, dim: int) -> tuple[int, int]:
    """(how many, how long) are the runs of `tensor` along `dim`."""
    length = tensor.shape[dim] if tensor.dim() else 1
    return tensor.numel() // max(length, 1), length


@rule(aten.sort.default, aten.sort.stable)
def sort(tracker, func, args, kwargs):
    """Up to 4,096 values a run in shared memory; longer ones by CUB, one by one, all at once, or by segments.

    Sort.cpp, sort_cuda; SortStable.cu, launch_stable_sort_kernel.
    """
    place = 2 if func is aten.sort.stable else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    source, card = args[0], tracker.card
    out = tracker.outputs(shapes.call(func, args, kwargs))
    count, length = _slices(source, dim)
    if not source.numel() or length <= 4096:
        return out
    n, key, capability = source.numel(), source.element_size(), card.gpu.capability
    real = source.dtype is torch.float32
    with Temporaries(card, "sort") as temporaries:
        take, give = temporaries.take, temporaries.give
        if source.stride(dim) != 1:
            take(n * key)
        if count == 1 or length >= 1_000_000:
            take(8 * length)
            for _ in range(count):
                give(take(cub.radix_sort(length, capability, key=key, real=real)))
        elif count < 128:
            take(8 * n)
            take(8 * n)
            sorted_keys = take(n * key)
            give(take(cub.radix_sort(n, capability, key=key, real=real)))
            give(sorted_keys)
            give(take(cub.radix_sort(n, capability, value=0, bits=max(1, math.ceil(math.log2(count))))))
        else:
            take(8 * n)  # CUB's segmented sort asks for more, which is not modelled
    return out


def _many_blocks(count: int, length: int) -> bool:
    """Whether top-k spreads a run over several blocks. TensorTopK.cu, should_use_multiblock."""
    limits = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
    return length >= next((least for most, least in limits if count <= most), 400)


@rule(aten.topk.default)
def topk(tracker, func, args, kwargs):
    """Digit counts of every block, then two running sums. TensorTopK.cu, mbtopk::launch."""
    source, card = args[0], tracker.card
    dim = args[2] if len(args) > 2 else -1
    out = tracker.outputs(shapes.call(func, args, kwargs))
    count, length = _slices(source, dim)
    with Temporaries(card, "top-k") as temporaries:
        temporaries.contiguous(source)
        if _many_blocks(count, length):
            resident = 65_536 // (40 * 256)  # blocks of 256 threads with 40 registers that fit an SM
            items = math.ceil(source.numel() / (card.gpu.sms * resident * 256))
            blocks = count * math.ceil(length / (256 * max(4, min(items, 64))))
            size = source.element_size()
            temporaries.take(count * size)  # the k-th values
            temporaries.take(2 * 4 * count)  # k left to find, before and after a digit
            temporaries.take(2 * max(4, size) * count)  # digits found
            temporaries.take(blocks * 256 * 2)  # counts by block
            temporaries.take(count * 256 * 4)  # and by run
            temporaries.take(4 * blocks)
            temporaries.take(4 * blocks)
            for _ in range(2):
                temporaries.give(temporaries.take(cub.scan_by_key(blocks)))
    return out


@rule(aten.cumsum.default)
def cumsum(tracker, func, args, kwargs):
    """An input of another type is cast first; one run is CUB's, several need nothing.

    ReduceOps.cpp, impl_func_cum_ops; ScanUtils.cuh, scan_dim.
    """
    out = tracker.outputs(shapes.call(func, args, kwargs))
    count, length = _slices(out, args[1])
    with Temporaries(tracker.card, "cumsum") as temporaries:
        if args[0].dtype is not out.dtype:
            temporaries.take(out.numel() * out.element_size())
        if count == 1 and length > 1:
            temporaries.take(cub.scan(length, out.element_size()))
    return out


@rule(aten.randperm.default, aten.randperm.generator)
def randperm(tracker, func, args, kwargs):
    """Random keys sort a range; their width makes a repeated key unlikely. Randperm.cu, randperm_out_cuda."""
    n, card = args[0], tracker.card
    out = tracker.outputs(func(*args, **kwargs))
    if not n:
        return out
    with Temporaries(card, "randperm") as temporaries:
        take, give = temporaries.take, temporaries.give
        give(take(out.element_size()))  # n as a scalar of the result's type, to see whether it fits
        take(n * out.element_size())
        bits = min(64, math.ceil(math.log2(n - (6 * n * n + 1) / (math.log(0.9) * 12))))
        key = 4 if bits <= 32 else 8
        take(n * key)
        take(n * key)
        give(take(cub.radix_sort(n, card.gpu.capability, key=key, value=out.element_size(), bits=bits)))
    return out


@rule(aten.multinomial.default)
def multinomial(tracker, func, args, kwargs):
    """Checks the weights, divides them by exponential draws and takes the largest. Distributions.cpp, multinomial."""
    weights, draws = args[0], args[1]
    replacement = args[2] if len(args) > 2 else False
    card, size = tracker.card, weights.element_size()
    out = tracker.outputs(func(*args, **kwargs))
    if replacement and draws > 1:
        return out
    rows = weights.numel() // weights.shape[-1]
    with Temporaries(card, "multinomial") as temporaries:
        take, give = temporaries.take, temporaries.give
        least, positive, most, finite = take(size), take(1), take(size), take(1)
        take(1)  # both
        for address in (finite, most, positive, least):
            give(address)
        sums, zero = take(size * rows), take(rows)
        some = take(1)
        give(zero)
        give(sums)
        give(take(1))
        scores = torch.empty_like(weights)
        draws_at = take(scores.numel() * size)
        if draws > 1:
            chosen = take(rows * draws * size)
            give(chosen)
        give(draws_at)
        give(some)
    return out
