"""The scratch of a CUDA reduction: how PyTorch splits it over thread blocks, and what that costs.

Follows aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, ReduceConfig) for one input and one output.
"""

from __future__ import annotations

import math

from gpt2.memory.gpus import Gpu
from gpt2.memory.software import Software

MAX_THREADS = 512  # mnt_wrapper<scalar_t>::MAX_NUM_THREADS
ACCUMULATOR = 4  # bytes: fp32 for every floating type up to 32 bits
VECTOR = 4  # values a thread reads at once: input_vec_size, where the kernel does not say otherwise


def scratch(
    shape, strides, dims, gpu: Gpu, software: Software, *, accumulator: int = ACCUMULATOR, vector: int = VECTOR
) -> tuple[int, ...]:
    """Bytes of (scratch, semaphores) that reducing `dims` (None: all) of a tensor takes; () if it takes none.

    `strides` are in elements, `accumulator` in bytes. Sizes are before the allocator's rounding.
    """
    kept, reduced = _coalesced(shape, strides, dims)
    outputs = math.prod(size for size, _ in kept)
    inputs = math.prod(size for size, _ in reduced)
    if not reduced:
        return ()
    fast = not kept or reduced[0][1] < kept[0][1]
    output_vector = 1
    if fast:
        d0, d1 = inputs, outputs
        enough = d0 >= 128 if software.release >= (2, 11) else d0 > 128
        if reduced[0][1] == 1 and len(reduced) == 1 and enough:
            d0 //= vector
    else:
        d0, d1 = outputs, inputs
        if kept[0][1] == 1:
            others = [stride for _, stride in kept[1:] + reduced]
            output_vector = next(v for v in (4, 2, 1) if kept[0][0] % v == 0 and all(s % v == 0 for s in others))
            d0 //= output_vector
    limit = MAX_THREADS // output_vector
    height = min(_floor_power2(d1, limit), limit // min(_floor_power2(d0, limit), 32))
    width = min(_floor_power2(d0, limit), limit // height)
    step_in, step_out = (width, 1) if fast else (1, width)
    per_thread = math.ceil(inputs / step_in)
    block_y = per_thread >= min(16 * height, 256)
    if block_y:
        step_in *= height
    else:
        step_out *= height
    per_thread = math.ceil(inputs / step_in)
    grid = math.ceil(outputs // output_vector / step_out)
    target = gpu.sms * (gpu.threads_per_sm // (width * height))
    if not (block_y and per_thread >= 256 and grid <= target):
        return ()
    ctas = max(min(math.ceil(target / grid), math.ceil(per_thread / 16)), math.ceil(per_thread / 256))
    if ctas <= 1:
        return ()
    size = accumulator * outputs * ctas
    return (size if fast else size * width * output_vector, 4 * grid)


def _floor_power2(n: int, limit: int) -> int:
    return limit if n >= limit else 1 << (max(n, 1).bit_length() - 1)


def _coalesced(shape, strides, dims) -> tuple[list, list]:
    """(size, stride) of kept and of reduced dimensions, by rising stride, neighbours that touch merged.

    TensorIterator puts reduced dimensions first, sorts by stride and merges: TensorIterator.cpp.
    """
    rank = len(shape)
    chosen = (
        set(range(rank))
        if dims is None or dims == [] or dims == ()
        else {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
        if rank
        else set()
    )
    groups = []
    for wanted in (False, True):
        dimensions = sorted(
            ((shape[d], strides[d]) for d in range(rank) if (d in chosen) == wanted and shape[d] != 1),
            key=lambda x: x[1],
        )
        merged: list[tuple[int, int]] = []
        for size, stride in dimensions:
            if merged and merged[-1][0] * merged[-1][1] == stride:
                merged[-1] = (merged[-1][0] * size, merged[-1][1])
            else:
                merged.append((size, stride))
        groups.append(merged)
    return groups[0], groups[1]
