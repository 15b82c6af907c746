"""What kernels and libraries take behind an operator's back.

A rule runs the operator and says, in order, what else is allocated around its outputs. Each names its source in
PyTorch; sizes are before the allocator's rounding. Operators without a rule take nothing but their outputs.
"""

from __future__ import annotations

import math

import torch

from gpt2.memory.kernels import reduction, shapes

aten = torch.ops.aten
RULES: dict = {}

_in_backward = torch._C._current_graph_task_id
CHUNK = 65_536  # elements a block of a multi-tensor kernel handles: kChunkSize, MultiTensorApply.cuh


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

    def contiguous(self, tensor, layout: torch.memory_format = torch.contiguous_format) -> int:
        """A copy of `tensor` in this layout, if it has another; its address (0 for none)."""
        if tensor.is_contiguous(memory_format=layout):
            return 0
        return self.take(tensor.numel() * tensor.element_size())

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


def _gemm_reads(matrix) -> bool:
    """Whether cuBLAS can read the (last two dimensions of the) matrix where it lies.

    Blas.cpp, prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas: one stride is 1 and the other steps over
    a whole row or column. A gradient that was expanded, such as that of `sum()`, has strides 0 and is copied.
    """
    rows, columns = matrix.shape[-2:]
    down, right = matrix.stride()[-2:]
    if right == 1 and down >= max(1, columns) or down == 1 and right >= max(1, rows):
        return True
    return matrix.is_contiguous() if matrix.dim() == 3 else dense(matrix)


def dense(tensor: torch.Tensor) -> bool:
    """Non-overlapping and dense: the strides, sorted, tile the storage."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@rule(aten.mm.default, aten.bmm.default, aten.baddbmm.default, aten.addbmm.default)
def matmul(tracker, func, args, kwargs):
    """A GEMM: its output, copies of operands it cannot read, cuBLAS's workspace if the thread has none. Blas.cpp."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    with Temporaries(tracker.card, "matmul: contiguous operand") as temporaries:
        for matrix in args[-2:]:
            if not _gemm_reads(matrix):
                temporaries.take(matrix.numel() * matrix.element_size())
        cublas(tracker.card)
    return out


@rule(aten.mv.default, aten.addmv.default, aten.dot.default, aten.vdot.default)
def vectors(tracker, func, args, kwargs):
    """Products with a vector: output, then workspace. Blas.cpp."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    cublas(tracker.card)
    return out


def _takes_cublaslt(bias, mat2, beta) -> bool:
    """Blas.cpp, addmm_out_cuda_impl: a contiguous 1-D bias as long as the result is wide, beta 1, and a second matrix
    of more than one row and column: "if mat2 has only 1 row or column", cublasLt finds no algorithm."""
    fits = bias.dim() == 1 and bias.is_contiguous() and mat2.dim() == 2 and bias.numel() == mat2.shape[1]
    return fits and beta == 1 and min(mat2.shape) > 1


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


def reduction_scratch(card, source, dims, **kernel) -> None:
    """Scratch and semaphores of one reduction of `source` over `dims`; `kernel` as in `reduction.scratch`."""
    if not source.numel():
        return
    sizes = reduction.scratch(tuple(source.shape), source.stride(), dims, card.gpu, card.software, **kernel)
    with Temporaries(card, "reduction scratch") as temporaries:
        for size in sizes:
            temporaries.take(size)


@rule(aten._softmax.default, aten._log_softmax.default)
def softmax(tracker, func, args, kwargs):
    """An input that is not contiguous is copied after the output is made. SoftMax.cu, host_softmax."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    with Temporaries(tracker.card, "softmax: contiguous input") as temporaries:
        temporaries.contiguous(args[0])
    return out


@rule(aten._softmax_backward_data.default)
def softmax_backward(tracker, func, args, kwargs):
    """grad * output is made first, as a tensor of its own. SoftMax.cu, softmax_backward_cuda."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    grad = args[0]
    with Temporaries(tracker.card, "softmax backward: grad * output") as temporaries:
        temporaries.take(grad.numel() * grad.element_size())
    return out


@rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(tracker, func, args, kwargs):
    """Gradient and output are made contiguous if they are not. SoftMax.cu, host_softmax_backward."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    with Temporaries(tracker.card, "log-softmax backward: contiguous input") as temporaries:
        for tensor in args[:2]:
            temporaries.contiguous(tensor)
    return out


@rule(
    aten.upsample_nearest2d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default,
)
def upsample_backward(tracker, func, args, kwargs):
    """A gradient that is not contiguous, such as part of a concatenation's, is copied. UpSampleNearest2d.cu, kin."""
    out = tracker.outputs(shapes.call(func, args, kwargs))
    grad = args[0]
    if not grad.is_contiguous() and not grad.is_contiguous(memory_format=torch.channels_last):
        with Temporaries(tracker.card, "upsampling backward: contiguous gradient") as temporaries:
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


@rule(aten.isinf.default)
def isinf(tracker, func, args, kwargs):
    """`self.abs() == inf`, but for integers. TensorCompare.cpp."""
    tensor = args[0]
    with Temporaries(tracker.card, "isinf: absolute values") as temporaries:
        if tensor.dtype.is_floating_point:
            temporaries.take(tensor.numel() * tensor.element_size())
        return tracker.outputs(shapes.call(func, args, kwargs))


@rule(aten.add.Tensor)
def add(tracker, func, args, kwargs):
    """A sum of two gradients in the engine happens in place if only the engine holds the first.

    input_buffer.cpp, can_accumulate_inplace: grad mode off, dense, the last reference to tensor and storage. A
    dispatch mode makes the engine add out of place, so the test is made here and the sum done as a real run does it.
    """
    if _in_backward() != -1 and tracker.only_the_engine_holds(args, kwargs):
        return aten.add_.Tensor(*args)
    return tracker.outputs(shapes.call(func, args, kwargs))


@rule(aten.native_dropout.default)
def dropout(tracker, func, args, kwargs):
    """The bool mask is made before the output. Dropout.cu, dropout_cuda."""
    out, mask = shapes.call(func, args, kwargs)
    tracker.outputs((mask, out))
    return out, mask


@rule(aten._foreach_norm.Scalar)
def foreach_norm(tracker, func, args, kwargs):
    """A buffer of partial norms, one row a tensor, before the outputs. ForeachReduceOp.cu."""
    tensors = args[0]
    with Temporaries(tracker.card, "foreach norm: partial sums") as temporaries:
        chunks = max(math.ceil(t.numel() / CHUNK) for t in tensors)
        temporaries.take(4 * len(tensors) * chunks)
        return tracker.outputs(shapes.call(func, args, kwargs))
