"""LSTM, GRU and plain RNN by cuDNN: what is allocated around its one call, in order.

native/cudnn/RNN.cpp: _cudnn_rnn, _cudnn_rnn_backward, copy_weights_to_flat_buf_views, get_dropout_state; under autocast
cudnn/AutocastRNN.cpp. Sizes of workspace and reserve: gpt2/memory/kernels/recurrent_sizes.py. The order is that of an
H200's recordings (results/measured/h200/recurrent-probes.json.gz). Not modelled: the new dropout state that follows a
new seed (`torch.manual_seed` between two calls with dropout), and stacks of LSTMCell, which are not cuDNN's.

Letters: T time, B batch, N tokens, I input width, H hidden width, L layers, D directions.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from gpt2.memory.kernels import recurrent_sizes, shapes
from gpt2.memory.kernels.recurrent_sizes import Net
from gpt2.memory.kernels.scratch import Temporaries, rule

KINDS = tuple(recurrent_sizes.GATES)
FLATTENED = (torch.half, torch.float, torch.double)  # torch.backends.cudnn.is_acceptable: not bf16
DROPOUT_STATE_PER_SM = 49_152  # cudnnDropoutGetStatesSize: 6,488,064 bytes on an H200 with its 132 SMs


@dataclass(frozen=True)
class Call:
    """What stays the same from forward to backward."""

    card: object
    net: Net
    training: bool
    batch_first: bool
    has_biases: bool

    @contextmanager
    def workspace(self, forward: bool):
        """cuDNN's workspace, for as long as the context is open."""
        algorithm = recurrent_sizes.algorithm(self.net, forward, self.card.gpu)
        with Temporaries(self.card, "cuDNN recurrent workspace") as temporaries:
            temporaries.take(recurrent_sizes.workspace(self.net, algorithm, self.training))
            yield

    def time_first(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1) if self.batch_first else x


def _split(flat: torch.Tensor, weights) -> list[torch.Tensor]:
    """Views of `flat` in the shapes of `weights`."""
    sizes = [w.numel() for w in weights]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]


def _are_flat(weights, elements: int) -> bool:
    """Whether they are views of one buffer as cuDNN wants it. RNN.cpp, try_get_weight_buf."""
    storages = {w.untyped_storage()._cdata for w in weights}
    return len(storages) == 1 and weights[0].untyped_storage().nbytes() >= elements * weights[0].element_size()


class _Recurrent(torch.autograd.Function):
    """One call of cuDNN over all layers and steps."""

    @staticmethod
    def forward(ctx, call, x, hx, cx, *weights):
        net = call.net
        x_TBI = call.time_first(x)
        copy = x_TBI.contiguous()
        out = x.new_empty(*x_TBI.shape[:-1], net.out * net.D)
        hy = torch.empty_like(hx)
        cy = torch.empty_like(cx) if cx is not None else x.new_empty(0)
        flat = None if _are_flat(weights, net.weights()) else x.new_empty(net.weights())
        reserve = None
        with call.workspace(forward=True):
            if call.training:
                reserve = x.new_empty(recurrent_sizes.reserve(net), dtype=torch.uint8)
        del copy
        out = call.time_first(out)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, hx, cx, out, reserve, flat, *weights)
        return out, hy, cy

    @staticmethod
    def backward(ctx, grad_out, grad_hy, grad_cy):
        x, hx, cx, out, reserve, flat, *weights = ctx.saved_tensors
        call = ctx.call
        x_TBI = call.time_first(x)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_hy = torch.zeros_like(hx) if grad_hy is None else grad_hy
        if cx is not None and grad_cy is None:
            grad_cy = torch.zeros_like(cx)
        copy = x_TBI.contiguous()
        dy = call.time_first(grad_out).contiguous()
        dx = x.new_empty(x_TBI.shape)
        dhx = torch.empty_like(hx)
        dcx = torch.empty_like(cx) if cx is not None else None
        with call.workspace(forward=False):
            pass
        del dy, copy
        needs = ctx.needs_input_grad
        parts = _weight_gradients(call, x_TBI, weights) if any(needs[4:]) else [None] * len(weights)
        grads = (grad if need else None for grad, need in zip((call.time_first(dx), dhx, dcx), needs[1:4], strict=True))
        return None, *grads, *parts


def _weight_gradients(call: Call, x_TBI: torch.Tensor, weights) -> list[torch.Tensor]:
    """Views of one flat buffer; without biases copies of the buffer's parts, since it has biases all the same."""
    copy = x_TBI.contiguous()
    flat = x_TBI.new_empty(call.net.weights())
    with call.workspace(forward=False):
        parts = _split(flat, weights) if call.has_biases else [torch.empty_like(w) for w in weights]
    del copy
    return parts


class _Part(torch.autograd.Function):
    """A weight's place in the flat buffer that autocast makes; its gradient in the weight's own type."""

    @staticmethod
    def forward(ctx, weight, part):
        ctx.dtype = weight.dtype
        return part.view_as(part)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None


def _cast(net: Net, weights, *states):
    """cudnn/AutocastRNN.cpp: fp16 whatever autocast's type is; the weights first, then the arguments from the last."""
    if weights[0].dtype is not torch.half:
        flat = weights[0].new_empty(net.weights(), dtype=torch.half)
        weights = [_Part.apply(w, part) for w, part in zip(weights, _split(flat, weights), strict=True)]
    states = [None if state is None else state.to(torch.half) for state in reversed(states)]
    return weights, *reversed(states)


class _Paths:
    """The card's ways for one kind of net: sequences of one length, and packed ones."""

    def __init__(self, card, kind: str, dropout_state):
        self.card, self.kind, self.dropout_state = card, kind, dropout_state

    def input(self, x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        T, B = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
        sizes = {"T": T, "B": B}
        return self._run(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first, sizes)

    def data(self, x, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional):
        sizes = {"T": len(batch_sizes), "B": int(batch_sizes[0]), "packed": True, "tokens": x.shape[0]}
        return self._run(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, False, sizes)

    def _run(self, x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first, sizes):
        hx, cx = hx if self.kind == "lstm" else (hx, None)
        hidden = hx.shape[-1] if cx is None else cx.shape[-1]
        if train and dropout:
            self.dropout_state()
        autocast = torch.is_autocast_enabled("cuda")
        dtype = torch.half if autocast else x.dtype
        net = Net(
            self.kind,
            I=x.shape[-1],
            H=hidden,
            L=num_layers,
            D=2 if bidirectional else 1,
            P=hx.shape[-1] if hx.shape[-1] != hidden else 0,
            dtype=str(dtype).removeprefix("torch."),
            itemsize=dtype.itemsize,
            dropout=bool(train and dropout),
            **sizes,
        )
        weights = params
        if autocast:
            weights, x, hx, cx = _cast(net, params, x, hx, cx)
        call = Call(self.card, net, train, batch_first, has_biases)
        out, hy, cy = _Recurrent.apply(call, x, hx, cx, *weights)
        return (out, hy) if self.kind != "lstm" else (out, hy, cy)


def flatten_parameters(module: nn.RNNBase) -> None:
    """Move the weights into one buffer, as cuDNN wants them. RNN.cpp, _cudnn_rnn_flatten_weight; nn/modules/rnn.py."""
    weights = module._flat_weights
    if not all(isinstance(w, torch.Tensor) and w.is_cuda and w.dtype is weights[0].dtype for w in weights):
        return
    if weights[0].dtype not in FLATTENED or len({w.data_ptr() for w in weights}) != len(weights):
        return
    sizes = {"I": module.input_size, "H": module.hidden_size, "P": module.proj_size, "L": module.num_layers}
    net = Net(module.mode.lower(), 1, 1, **sizes, D=2 if module.bidirectional else 1)
    with torch.no_grad():
        flat = weights[0].new_empty(net.weights())
        for weight, part in zip(weights, _split(flat, weights), strict=True):
            weight.data = part


@rule(torch.ops.aten._pack_padded_sequence.default)
def pack(tracker, func, args, kwargs):
    """Steps that have as many sequences are cut out, as copies where they are not contiguous. PackedSequence.cpp."""
    x, lengths, batch_first = args
    x_TBI = x.transpose(0, 1) if batch_first else x
    ends = [0, *reversed(lengths.tolist())]
    with Temporaries(tracker.card, "packed sequence: steps") as temporaries:
        for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
            steps = x_TBI[start:end, : len(ends) - 1 - i]
            if end > start:
                temporaries.contiguous(steps)
        return tracker.outputs(shapes.call(func, args, kwargs))


def _dropout_state(card):
    """The generator's state on the card: made for the first call with dropout and kept."""
    kept = []

    def state():
        if not kept:
            with Temporaries(card, "cuDNN dropout seed") as temporaries:
                temporaries.take(8)
            kept.append(card.take(DROPOUT_STATE_PER_SM * card.gpu.sms, "cuDNN dropout state"))

    return state


def paths(card) -> dict:
    """Name of the operator and the card's way of doing it."""
    state = _dropout_state(card)
    found = {}
    for kind in KINDS:
        ways = _Paths(card, kind, state)
        found |= {f"{kind}.input": ways.input, f"{kind}.data": ways.data}
    return found
