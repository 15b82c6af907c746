"""Convolutions by cuDNN: outputs, copies and workspaces in the order in which PyTorch asks for them.

The workspace depends on the engine that cuDNN chooses: convolution_choices.py says which one that is, and
convolution_engines.py how many bytes it takes. A 1-d convolution is a 2-d one of height 1 (Convolution.cpp, view4d); a
transposed one is the input gradient of the convolution whose input it makes, and its own input gradient that one's
forward. Depthwise ones are often PyTorch's own (depthwise.py). Not modelled: 3-d convolutions and double precision,
taken as needing nothing.
"""

from __future__ import annotations

import torch

from gpt2.memory.kernels import depthwise, shapes
from gpt2.memory.kernels.convolution_choices import choose
from gpt2.memory.kernels.convolution_engines import FORWARD, INPUT, WEIGHT, Shape, workspace
from gpt2.memory.kernels.scratch import Temporaries, reduction_scratch, rule

aten = torch.ops.aten
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
WORKSPACE = "cuDNN convolution workspace"  # as traces name it


def _layout(source: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The layout cuDNN is called with: channels last if either is. ConvUtils.h, cudnn_conv_suggest_memory_format."""
    last = torch.channels_last if source.dim() == 4 else torch.channels_last_3d
    if source.dim() >= 4 and any(
        not t.is_contiguous() and t.is_contiguous(memory_format=last) for t in (source, weight)
    ):
        return last
    return torch.contiguous_format


def _pair(sizes) -> tuple[int, int]:
    """Two sizes; for an image of one dimension, with a height of 1 before them. A single stride counts for both."""
    sizes = tuple(sizes)
    return sizes if len(sizes) == 2 else (1, *sizes)


def asked(which: str, source, weight, out, stride, transposed: bool, groups: int) -> Shape:
    """One pass of a convolution as cuDNN sees it; `out` is its output or the gradient of that."""
    if transposed:
        source, out = out, source
        which = {FORWARD: INPUT, INPUT: FORWARD}.get(which, which)
    return Shape(
        which,
        DTYPES[source.dtype],
        images=source.shape[0],
        channels=source.shape[1],
        filters=out.shape[1],
        image=_pair(source.shape[2:]),
        kernel=_pair(weight.shape[2:]),
        out=_pair(out.shape[2:]),
        stride=_pair(stride),
        groups=groups,
        channels_last=_layout(source, weight) is torch.channels_last,
        tf32=torch.backends.cudnn.allow_tf32 or source.dtype is not torch.float32,
    )


def known(source: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether this is a convolution that is modelled, and of anything."""
    return source.dim() <= 4 and source.dtype in DTYPES and source.numel() > 0 and out.numel() > 0


def workspace_bytes(which: str, source, weight, out, stride, transposed: bool, groups: int) -> int:
    """Bytes of the workspace of one pass."""
    if not known(source, out):
        return 0
    shape = asked(which, source, weight, out, stride, transposed, groups)
    return workspace(shape, choose(shape))


@rule(aten.convolution.default)
def forward(tracker, func, args, kwargs):
    """Input in cuDNN's layout, output, workspace. Convolution.cpp, ConvShared.cpp; the bias is added in place."""
    source, weight, _, stride, _, _, transposed, _, groups = args
    layout = _layout(source, weight)
    if layout is torch.contiguous_format and depthwise.native(source, weight, args[3:]):
        return depthwise.forward(tracker, func, args, kwargs)
    with Temporaries(tracker.card, WORKSPACE) as temporaries:
        temporaries.contiguous(source, layout)
        out = shapes.call(func, args, kwargs)
        if layout is not torch.contiguous_format:  # the meta kernel does not know the card's layout
            out = out.to(memory_format=layout)
        tracker.outputs(out)
        temporaries.contiguous(weight, layout)
        temporaries.take(workspace_bytes(FORWARD, source, weight, out, stride, transposed, groups))
    return out


@rule(aten.convolution_backward.default)
def backward(tracker, func, args, kwargs):
    """Gradients of input, weight and bias, each after the other with its workspace.

    Convolution.cpp, ConvShared.cpp: input and output's gradient are brought into cuDNN's layout once, the weight for
    the input's gradient only.
    """
    grad, source, weight = args[:3]
    stride, transposed, groups = args[4], args[7], args[9]
    layout = _layout(source, weight)
    if layout is torch.contiguous_format and depthwise.native(source, weight, args[4:10]):
        return depthwise.backward(tracker, func, args, kwargs)
    out = shapes.call(func, args, kwargs)
    last = out[1] if out[1] is not None else out[0]
    with Temporaries(tracker.card, WORKSPACE) as temporaries:
        source_copy = temporaries.contiguous(source, layout)
        grad_copy = temporaries.contiguous(grad, layout)
        for which, gradient in zip((INPUT, WEIGHT), out, strict=False):
            if gradient is None:
                continue
            tracker.outputs(gradient)
            weight_copy = temporaries.contiguous(weight, layout) if which == INPUT else 0
            size = workspace_bytes(which, source, weight, grad, stride, transposed, groups)
            workspace_at = temporaries.take(size)
            if gradient is last:
                temporaries.give(grad_copy)
                if source.dim() > 3:  # an image of one dimension is copied before all else and kept
                    temporaries.give(source_copy)
            temporaries.give(workspace_at)
            temporaries.give(weight_copy)
        if out[2] is not None:
            tracker.outputs(out[2])
            reduction_scratch(tracker.card, grad, [0, *range(2, grad.dim())])
    return out
