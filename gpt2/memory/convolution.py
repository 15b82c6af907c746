"""Convolutions by cuDNN: outputs exactly, workspaces by what can be read off recordings.

cuDNN picks an algorithm by a heuristic that is not published, and asks for what it needs. Its tensor-core kernels want
channels last; for tensors that are channels first it converts input, weight and output in its workspace. Modelled, from
48 lists of kernel-probes.json and 87 convolutions of five recorded nets (H200, cuDNN 9.19; letters: X input, W weight,
Y output, in bytes):

* all three converted: X + W + Y + 16; a 1 x 1 convolution leaves W as it is;
* channels: 16-bit kernels read a multiple of 8; the weight gradient in fp32 (TF32) reads a multiple of 4;
* a strided input gradient takes 131 bytes more;
* fp32, 32 to 64 channels in, 16 or more images of 28 x 28 or more out: the forward kernel writes Y channels first
  itself; a 1 x 1 kernel whose result has images that large, forward or backward, converts nothing;
* fp32, fewer than 4 channels in: 3 x 3 runs without tensor cores and without workspace; patches (stride as wide as the
  kernel) do so forward, and kernels of 7 x 7 for the input's gradient;
* weight gradients in fp32 sum over the batch in pieces, as many as fill the card once with 128 x 128 or 64 x 64 tiles
  of W, and keep that many partial W; below 64 channels in, each buffer is aligned to 128 bytes.

A 1-d convolution is a 2-d one of height 1 (Convolution.cpp, view4d); a transposed one is the input gradient of the
convolution whose input it makes, and its own input gradient that one's forward: the same rules, without a recording.

Not modelled: the number of pieces where cuDNN chooses another tile, and in 16 bit (up to 4 MB seen, 1 to 16 % of that
workspace); grouped and 3-d convolutions, weight gradients of channels-last tensors and fp32 without TF32, all taken as
needing nothing.
"""

from __future__ import annotations

import math

import torch

from gpt2.memory import shapes
from gpt2.memory.gpus import Gpu
from gpt2.memory.scratch import Temporaries, reduction_scratch, rule

aten = torch.ops.aten
DIRECT_FROM = 28 * 28  # points of an image that fp32 kernels write channels first themselves
STRIDED_INPUT = 131  # bytes that a strided input gradient takes besides
FORWARD, INPUT, WEIGHT = "forward", "input", "weight"  # the three passes


def _padded(tensor: torch.Tensor, multiple: int) -> int:
    """Bytes of `tensor` (N, C, ...) with C rounded up."""
    channels = tensor.shape[1]
    return tensor.numel() // channels * (-(-channels // multiple) * multiple) * tensor.element_size()


def _pieces(weight: torch.Tensor, gpu: Gpu) -> int:
    """Into how many the sum of a weight gradient is split so that its tiles fill the card once; 0 if it is not."""
    rows, columns = weight.shape[0], weight[0].numel()
    tile = 128 if min(weight.shape[:2]) >= 128 else 64
    tiles = math.ceil(rows / (128 if rows >= 128 else 64)) * math.ceil(columns / tile)
    pieces = gpu.sms // tiles
    return pieces if pieces > 1 else 0


def _on_tensor_cores(which: str, source: torch.Tensor, weight: torch.Tensor, stride) -> bool:
    """Whether cuDNN converts to channels last at all."""
    if source.element_size() == 2:
        return source.shape[1] > 3 or weight.shape[-1] > 3 or which != FORWARD
    if not torch.backends.cudnn.allow_tf32:
        return False
    if source.shape[1] >= 4:
        return True
    kernel = weight.shape[-1]
    if kernel <= 3:
        return False
    patches = kernel == stride[-1]
    return which == WEIGHT or patches == (which == INPUT)


def workspace(which: str, source: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, stride, gpu: Gpu) -> int:
    """Bytes of cuDNN's workspace for one pass of a plain convolution: `out` is its output or the gradient of that."""
    if _layout(source, weight) is torch.channels_last:
        return STRIDED_INPUT if which == INPUT and stride[-1] > 1 else 0
    if not _on_tensor_cores(which, source, weight, stride):
        return 0
    half, kernel, step = source.element_size() == 2, weight.shape[-1], stride[-1]
    made = {FORWARD: out, INPUT: source}.get(which, weight)
    large = math.prod(made.shape[2:]) >= DIRECT_FROM and not half
    if large and kernel == 1:
        return 0
    multiple = 8 if half and not (which == INPUT and kernel == step > 1) else 4 if which == WEIGHT else 1
    size = _padded(source, multiple) + 16
    if kernel > 1:
        size += _padded(weight, multiple)
        if which == WEIGHT and not half:
            size += _pieces(weight, gpu) * _padded(weight, multiple) + (128 if source.shape[1] < 64 else 0)
    if not (large and which == FORWARD and 32 <= source.shape[1] <= 64 and source.shape[0] >= 16):
        size += out.numel() * out.element_size()
    return size + (STRIDED_INPUT if which == INPUT and step > 1 and kernel != step else 0)


def _layout(source: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The layout cuDNN is called with: channels last if either is. ConvUtils.h, cudnn_conv_suggest_memory_format."""
    last = torch.channels_last if source.dim() == 4 else torch.channels_last_3d
    if source.dim() >= 4 and any(
        not t.is_contiguous() and t.is_contiguous(memory_format=last) for t in (source, weight)
    ):
        return last
    return torch.contiguous_format


def _copied(temporaries: Temporaries, tensor: torch.Tensor, layout: torch.memory_format) -> int:
    """A copy of `tensor` in this layout if it has another."""
    return 0 if tensor.is_contiguous(memory_format=layout) else temporaries.take(tensor.numel() * tensor.element_size())


def _size(which: str, source, weight, out, stride, transposed: bool, groups: int, gpu: Gpu) -> int:
    if groups != 1 or source.dim() > 4:
        return 0
    if transposed:
        source, out = out, source
        which = {FORWARD: INPUT, INPUT: FORWARD}.get(which, which)
    return workspace(which, source, weight, out, stride, gpu)


@rule(aten.convolution.default)
def forward(tracker, func, args, kwargs):
    """Input in cuDNN's layout, output, workspace. Convolution.cpp, ConvShared.cpp; the bias is added in place."""
    source, weight, _, stride, _, _, transposed, _, groups = args
    layout = _layout(source, weight)
    with Temporaries(tracker.card, "cuDNN convolution workspace") as temporaries:
        _copied(temporaries, source, layout)
        out = shapes.call(func, args, kwargs)
        if layout is not torch.contiguous_format:  # the meta kernel does not know the card's layout
            out = out.to(memory_format=layout)
        tracker.outputs(out)
        _copied(temporaries, weight, layout)
        temporaries.take(_size(FORWARD, source, weight, out, stride, transposed, groups, tracker.card.gpu))
    return out


@rule(aten.convolution_backward.default)
def backward(tracker, func, args, kwargs):
    """Gradients of input, weight and bias, each after the other with its workspace.

    Convolution.cpp, ConvShared.cpp: input and output's gradient are brought into cuDNN's layout once, the weight for
    the input's gradient only.
    """
    grad, source, weight = args[:3]
    stride, transposed, groups = args[4], args[7], args[9]
    out = shapes.call(func, args, kwargs)
    layout, last = _layout(source, weight), out[1] if out[1] is not None else out[0]
    with Temporaries(tracker.card, "cuDNN convolution workspace") as temporaries:
        source_copy = _copied(temporaries, source, layout)
        grad_copy = _copied(temporaries, grad, layout)
        for which, gradient in zip((INPUT, WEIGHT), out, strict=False):
            if gradient is None:
                continue
            tracker.outputs(gradient)
            weight_copy = _copied(temporaries, weight, layout) if which == INPUT else 0
            size = _size(which, source, weight, grad, stride, transposed, groups, tracker.card.gpu)
            workspace_at = temporaries.take(size)
            if gradient is last:
                temporaries.give(grad_copy)
                temporaries.give(source_copy)
            temporaries.give(workspace_at)
            temporaries.give(weight_copy)
    if out[2] is not None:
        tracker.outputs(out[2])
        dims = [0, *range(2, grad.dim())]
        reduction_scratch(tracker.card, grad, dims)
    return out
