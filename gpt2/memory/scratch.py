"""What kernels and libraries take behind an operator's back.

A rule runs the operator and says, in order, what else is allocated around its outputs. Each names its source in
PyTorch; sizes are before the allocator's rounding. Operators without a rule take nothing but their outputs.
"""

from __future__ import annotations

import math

import torch

from gpt2.memory import reduction, shapes

aten = torch.ops.aten
RULES: dict = {}

_in_backward = torch._C._current_graph_task_id
CHUNK = 65_536  # elements a block of a multi-tensor kernel handles: kChunkSize, MultiTensorApply.cuh
EMBEDDING_SORT_FROM = 3_072  # indices above which embedding backward sorts: Embedding.cu


def rule(*funcs):
    """Register a rule for these operator overloads."""

    def register(function):
        RULES.update(dict.fromkeys(funcs, function))
        return function

    return register


class Temporaries:
    """Blocks an operator takes for itself: named as allocated, freed in reverse order at the latest."""

    def __init__(self, card, what: str):
        self.card, self.what, self.held = card, what, []

    def take(self, size: int) -> int:
        """Allocate `size` bytes and return the address (0 for none)."""
        address = self.card.take(size, self.what)
        if address:
            self.held.append(address)
        return address

    def give(self, address: int) -> None:
        """Free one of them now."""
        if address:
            self.held.remove(address)
            self.card.free(address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        while self.held:
            self.card.free(self.held.pop())


def cublas(card) -> None:
    """The workspace of this thread's handle on this stream: made once, kept for good.

    CublasHandlePool.cpp: one handle per thread; the autograd engine's device thread has its own.
    """
    card.workspace("cublas workspace", card.software.cublas_workspace_bytes)


@rule(
    aten.mm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.addbmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.dot.default,
    aten.vdot.default,
)
def matmul(tracker, func, args, kwargs):
    """A GEMM: its output, then cuBLAS's workspace if this thread has none yet. Blas.cpp."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    cublas(tracker.card)
    return out


def _takes_cublaslt(bias, mat2, beta) -> bool:
    """Blas.cpp, addmm_out_cuda_impl: a contiguous 1-D bias as long as the result is wide, beta 1."""
    return bias.dim() == 1 and bias.is_contiguous() and mat2.dim() == 2 and bias.numel() == mat2.shape[1] and beta == 1


@rule(aten.addmm.default)
def addmm(tracker, func, args, kwargs):
    """A linear layer with bias goes through cuBLASLt, which wants a workspace of its own. CUDABlas.cpp."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    card = tracker.card
    if not _takes_cublaslt(args[0], args[2], kwargs.get("beta", 1)) or out.numel() == 0:
        cublas(card)
    elif card.software.cublaslt == "transient":  # taken before the handle is fetched
        with Temporaries(card, "cublasLt workspace") as temporaries:
            temporaries.take(card.software_lt_bytes)
            cublas(card)
    else:
        cublas(card)
        if card.software.cublaslt == "persistent":
            card.workspace("cublasLt workspace", card.software_lt_bytes)
    return out


@rule(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
def reduce(tracker, func, args, kwargs):
    """A reduction that splits one output over several blocks needs scratch and semaphores. Reduce.cuh."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    source = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple | int) else None
    _reduction_scratch(tracker.card, source, dims, "reduction scratch")
    return out


def _reduction_scratch(card, source, dims, what) -> None:
    if not source.numel():
        return
    sizes = reduction.scratch(
        tuple(source.shape), source.stride(), source.element_size(), dims, card.gpu, card.software
    )
    with Temporaries(card, what) as temporaries:
        for size in sizes:
            temporaries.take(size)


@rule(aten._softmax_backward_data.default)
def softmax_backward(tracker, func, args, kwargs):
    """grad * output is made first, as a tensor of its own. SoftMax.cu, softmax_backward_cuda."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    grad = args[0]
    with Temporaries(tracker.card, "softmax backward: grad * output") as temporaries:
        temporaries.take(grad.numel() * grad.element_size())
    return out


@rule(aten._safe_softmax.default)
def safe_softmax(tracker, func, args, kwargs):
    """Rows of minus infinity are looked for after the softmax and set to 0 in place. attention.cpp, _safe_softmax."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    scores = args[0]
    with Temporaries(tracker.card, "safe softmax: masked rows") as temporaries:
        for size in (scores.numel(), scores.numel() // scores.shape[args[1]], scores.element_size()):
            temporaries.take(size)
    return out


@rule(aten.add.Tensor)
def add(tracker, func, args, kwargs):
    """A sum of two gradients in the engine happens in place if only the engine holds the first.

    input_buffer.cpp, can_accumulate_inplace: grad mode off, dense, the last reference to tensor and storage. A
    dispatch mode makes the engine add out of place, so the test is made here and the sum done as a real run does it.
    """
    if _in_backward() != -1 and tracker.only_the_engine_holds(args, kwargs):
        tracker.card.labels.stack  # the sum has no caller of its own
        return aten.add_.Tensor(*args)
    return tracker.outputs(shapes.call(func, args, kwargs))


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(tracker, func, args, kwargs):
    """Tall and narrow inputs: partial sums of the weight's and bias's gradients, then two reductions.

    layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: more than 65,536 rows and too few columns for the card.
    """
    card, grad, weight = tracker.card, args[0], args[5]
    columns = math.prod(args[2])
    rows = grad.numel() // columns
    out = shapes.call(func, args, kwargs)
    tall = rows > 65_536 and columns // 32 < card.gpu.sms // 2 and card.software.release >= (2, 8)
    if weight is None or not tall:
        return tracker.outputs(out)
    tracker.outputs(out[0])
    tiles = math.ceil(columns / 32)
    blocks = min(math.ceil(rows / 32), 32_768 // tiles)
    size, itemsize = columns * weight.element_size(), weight.element_size()
    with Temporaries(card, "layer norm backward: partial sums") as temporaries:
        replaced = [temporaries.take(size), temporaries.take(size)]
        temporaries.take(blocks * size)
        temporaries.take(blocks * size)
        for gradient, old in zip(out[1:], replaced, strict=True):
            tracker.outputs(gradient)
            scratch = reduction.scratch((blocks, columns), (columns, 1), itemsize, [0], card.gpu, card.software)
            with Temporaries(card, "reduction scratch") as inner:
                for bytes_ in scratch:
                    inner.take(bytes_)
            temporaries.give(old)
    return out


@rule(aten.embedding.default)
def embedding(tracker, func, args, kwargs):
    """Indices that are not contiguous are copied first. Embedding.cpp: index_select(indices.reshape(-1))."""
    indices = args[1]
    with Temporaries(tracker.card, "embedding: contiguous indices") as temporaries:
        if not indices.is_contiguous():
            temporaries.take(indices.numel() * indices.element_size())
        return tracker.outputs(shapes.call(func, args, kwargs))


@rule(aten.native_dropout.default)
def dropout(tracker, func, args, kwargs):
    """The bool mask is made before the output. Dropout.cu, dropout_cuda."""
    out, mask = shapes.call(func, args, kwargs)
    tracker.outputs((mask, out))
    return out, mask


def _round256(size: int) -> int:
    return (size + 255) // 256 * 256


def radix_sort_bytes(n: int, capability: tuple[int, int]) -> int:
    """CUB's onesweep radix sort of n int64 keys with 8-byte values (device_radix_sort.cuh, CUDA 13)."""
    tile = 4608 if capability >= (9, 0) else 3840
    parts = (8 * 256 * 8, math.ceil(n / tile) * 1024, 8 * n, 8 * n, 32)
    return sum(_round256(p) for p in parts) + 255


def scan_bytes(n: int, tile: int = 896) -> int:
    """CUB's look-back state: 16 bytes a tile (agent_scan.cuh, SingleTileState); an exclusive sum has tiles of 896 (CUDA 13)."""
    inner = _round256(16 * (math.ceil(n / tile) + 32)) + 255
    return _round256(inner) + 255


def unique_bytes(n: int, capability: tuple[int, int]) -> int:
    """CUB's unique_by_key of n int64 keys and values: tiles of 448 x 11 on sm_90, 192 x 7 before.

    tuning_unique_by_key.cuh, key and value size 8.
    """
    return scan_bytes(n, 448 * 11 if capability >= (9, 0) else 192 * 7)


@rule(aten.embedding_dense_backward.default)
def embedding_backward(tracker, func, args, kwargs):
    """Many indices are sorted and summed by segment. Embedding.cu and EmbeddingBackwardKernel.cu."""
    grad, indices, rows = args[0], args[1], args[2]
    by_frequency = args[4] if len(args) > 4 else False
    n, width, card = indices.numel(), grad.shape[-1], tracker.card
    with Temporaries(card, "embedding backward: sort") as temporaries:
        take, give = temporaries.take, temporaries.give
        if not indices.is_contiguous():
            take(8 * n)
        if n <= EMBEDDING_SORT_FROM and not by_frequency:
            return tracker.outputs(shapes.call(func, args, kwargs))
        take(8 * n)  # sorted indices
        take(8 * n)  # where they came from
        counting = take(8 * n)
        give(take(radix_sort_bytes(n, card.gpu.capability)))
        give(counting)
        out = tracker.outputs(shapes.call(func, args, kwargs))
        segments = n // 10 + min(n, rows)  # partial sums at most: one per 10 indices and one per row
        take(8 * n)  # where each row's run begins
        take(8)  # how many runs
        keys = take(8 * n)
        give(take(unique_bytes(n, card.gpu.capability)))
        give(keys)
        take(8 * min(n, rows))  # partial sums per run
        take(8 * min(n, rows))  # and where they begin
        give(take(scan_bytes(min(n, rows))))
        take(8)
        take(8 * segments)
        take(4 * segments * width)  # the partial sums, fp32
        return out


@rule(aten._foreach_norm.Scalar)
def foreach_norm(tracker, func, args, kwargs):
    """A buffer of partial norms, one row a tensor, before the outputs. ForeachReduceOp.cu."""
    tensors = args[0]
    with Temporaries(tracker.card, "foreach norm: partial sums") as temporaries:
        chunks = max(math.ceil(t.numel() / CHUNK) for t in tensors)
        temporaries.take(4 * len(tensors) * chunks)
        return tracker.outputs(shapes.call(func, args, kwargs))
