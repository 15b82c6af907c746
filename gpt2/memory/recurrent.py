"""LSTM, GRU and plain RNN by cuDNN: outputs, reserve and gradients in their order; half of the workspace.

native/cudnn/RNN.cpp, _cudnn_rnn and _cudnn_rnn_backward. The reserve is what an H200 with cuDNN 9.19 took for each
kind and for one and two layers (results/measured/h200/kernel-probes.json). Of the
workspace only the part that is plain there: a copy of all weight matrices (two kinds of net that differ in nothing else
differ by exactly that; what remains follows no rule that could be found, and is as much again or more). Not modelled:
dropout between layers; projections; packed sequences, which run step by step.

Letters: T time, B batch, H hidden width, L layers, D directions.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn

from gpt2.memory.scratch import Temporaries

KEPT = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}  # T x B x H tensors that a layer keeps for its backward


def reserve_bytes(kind: str, T: int, B: int, H: int, L: int, D: int, itemsize: int) -> int:
    """What every layer keeps, the output of every layer but the last, and 256 bytes."""
    return (T * B * H * D * (KEPT[kind] * L + L - 1)) * itemsize + 256


def _flat_like(x: torch.Tensor, weights) -> torch.Tensor:
    """All weights in one buffer, in the type of `x`."""
    return x.new_empty(sum(w.numel() for w in weights))


def _split(flat: torch.Tensor, weights) -> list[torch.Tensor]:
    """Views of `flat` in the shapes of `weights`."""
    parts = flat.split([w.numel() for w in weights])
    return [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]


@contextmanager
def _workspace(card, x, weights):
    with Temporaries(card, "cuDNN recurrent workspace") as temporaries:
        temporaries.take(sum(w.numel() for w in weights if w.dim() == 2) * x.element_size())
        yield


class _Recurrent(torch.autograd.Function):
    """One call of cuDNN over all layers and steps."""

    @staticmethod
    def forward(ctx, card, kind, layers, train, batch_first, directions, x, hx, cx, *weights):
        flat = (
            _flat_like(x, weights) if weights[0].dtype is not x.dtype else None
        )  # autocast: _cudnn_rnn_cast_reflatten
        x_TBI = x.transpose(0, 1) if batch_first else x
        T, B, _ = x_TBI.shape
        H = hx.shape[-1]
        copy = x_TBI.contiguous()
        out = x.new_empty(T, B, H * directions)
        hy = torch.empty_like(hx)
        cy = torch.empty_like(cx) if cx is not None else x.new_empty(0)
        reserve = None
        with _workspace(card, x, weights):
            if train:
                size = reserve_bytes(kind, T, B, H, layers, directions, x.element_size())
                reserve = x.new_empty(size, dtype=torch.uint8)
        del copy
        out = out.transpose(0, 1) if batch_first else out
        ctx.card, ctx.batch_first = card, batch_first
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, hx, cx, out, reserve, flat, *weights)
        return out, hy, cy

    @staticmethod
    def backward(ctx, grad_out, grad_hy, grad_cy):
        x, hx, cx, out, reserve, flat, *weights = ctx.saved_tensors
        x_TBI = x.transpose(0, 1) if ctx.batch_first else x
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_hy = torch.zeros_like(hx) if grad_hy is None else grad_hy
        if cx is not None and grad_cy is None:
            grad_cy = torch.zeros_like(cx)
        copy = x_TBI.contiguous()
        dy = (grad_out.transpose(0, 1) if ctx.batch_first else grad_out).contiguous()
        dx = x.new_empty(x_TBI.shape)
        dhx = torch.empty_like(hx)
        dcx = torch.empty_like(cx) if cx is not None else None
        with _workspace(ctx.card, x, weights):
            pass
        del dy, copy
        copy = x_TBI.contiguous()
        parts = _split(_flat_like(x, weights), weights)
        with _workspace(ctx.card, x, weights):
            pass
        del copy
        if flat is not None:
            parts = [part.to(w.dtype) for part, w in zip(parts, weights, strict=True)]
        dx = dx.transpose(0, 1) if ctx.batch_first else dx
        needs = ctx.needs_input_grad[6:9]
        grads = (grad if needed else None for grad, needed in zip((dx, dhx, dcx), needs, strict=True))
        return None, None, None, None, None, None, *grads, *parts


def _path(card, kind: str):
    def run(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        hidden, cell = hx if kind == "lstm" else (hx, None)
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            x, hidden, cell = x.to(dtype), hidden.to(dtype), cell if cell is None else cell.to(dtype)
        directions = 2 if bidirectional else 1
        out, hy, cy = _Recurrent.apply(card, kind, num_layers, train, batch_first, directions, x, hidden, cell, *params)
        return (out, hy, cy) if kind == "lstm" else (out, hy)

    return run


def flatten_parameters(module: nn.RNNBase) -> None:
    """Move the weights into one buffer, as cuDNN wants them. RNN.cpp, _cudnn_rnn_flatten_weight."""
    weights = module._flat_weights
    if not all(isinstance(w, torch.Tensor) and w.is_cuda and w.dtype is weights[0].dtype for w in weights):
        return
    if len({w.data_ptr() for w in weights}) != len(weights):
        return
    with torch.no_grad():
        for weight, part in zip(weights, _split(_flat_like(weights[0], weights), weights), strict=True):
            weight.data = part


def paths(card) -> dict:
    """Name of the operator and the card's way of doing it."""
    return {f"{kind}.input": _path(card, kind) for kind in KEPT}
