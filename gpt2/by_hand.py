"""The training step without autograd: every layer says itself what it keeps and how it goes backward.

A layer's `forward` returns its output and its context, what backward will need; `backward` takes the gradient of the
output and the context, adds to the gradients of its parameters, and returns the gradient of the input. The contexts
are the activation memory: the very tensors that autograd keeps for the same model.

Shape suffixes: B batch, T length, D width, H heads, K width of one head, V vocabulary, N = B·T.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from gpt2 import model

Context = tuple


class Parameter:
    """A tensor that is trained: its value, its gradient (None between steps) and, once it was updated, its moments."""

    def __init__(self, value: Tensor):
        self.value = value.detach().clone()
        self.grad: Tensor | None = None
        self.m: Tensor | float = 0.0  # running mean of the gradient; a tensor from the first update on
        self.v: Tensor | float = 0.0  # running mean of its square

    def collect(self, grad: Tensor) -> None:
        """The first gradient is kept, later ones are added: so a weight that is used twice gets both its halves."""
        self.grad = grad if self.grad is None else self.grad + grad


class Embedding:
    """Row `i` of a table for each index `i`."""

    def __init__(self, weight: Parameter):
        self.weight = weight

    def forward(self, indices: Tensor) -> tuple[Tensor, Context]:
        return self.weight.value[indices], (indices,)

    def backward(self, dy: Tensor, context: Context) -> None:
        (indices,) = context
        grad = torch.zeros_like(self.weight.value)
        self.weight.collect(grad.index_add_(0, indices.flatten(), dy.reshape(-1, dy.shape[-1])))


class Linear:
    """y = x·Wᵀ + b. Two matrix products backward: one for the input, one for the weight, which needs x."""

    def __init__(self, weight: Parameter, bias: Parameter | None = None):
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> tuple[Tensor, Context]:
        y = x @ self.weight.value.t()
        return (y if self.bias is None else y + self.bias.value), (x,)

    def backward(self, dy: Tensor, context: Context) -> Tensor:
        (x,) = context
        x_rows, dy_rows = x.flatten(0, -2), dy.flatten(0, -2)
        self.weight.collect(dy_rows.t() @ x_rows)
        if self.bias is not None:
            self.bias.collect(dy_rows.sum(0))
        return dy @ self.weight.value


class LayerNorm:
    """Each row to mean 0 and variance 1, then scaled and shifted. Keeps its input and two numbers per row."""

    def __init__(self, weight: Parameter, bias: Parameter, eps: float = 1e-5):
        self.weight, self.bias, self.eps = weight, bias, eps

    def forward(self, x: Tensor) -> tuple[Tensor, Context]:
        mean = x.mean(-1, keepdim=True)
        rstd = ((x - mean).square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (x - mean) * rstd * self.weight.value + self.bias.value, (x, mean, rstd)

    def backward(self, dy: Tensor, context: Context) -> Tensor:
        x, mean, rstd = context
        normal = (x - mean) * rstd
        self.weight.collect((dy * normal).flatten(0, -2).sum(0))
        self.bias.collect(dy.flatten(0, -2).sum(0))
        dnormal = dy * self.weight.value
        return rstd * (dnormal - dnormal.mean(-1, keepdim=True) - normal * (dnormal * normal).mean(-1, keepdim=True))


class Gelu:
    """x times a smooth step, in the tanh form: y = x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³)))."""

    def forward(self, x: Tensor) -> tuple[Tensor, Context]:
        return 0.5 * x * (1 + self._tanh(x)), (x,)

    def backward(self, dy: Tensor, context: Context) -> Tensor:
        (x,) = context
        tanh = self._tanh(x)
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x.square())
        return dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh.square()) * slope)

    def _tanh(self, x: Tensor) -> Tensor:
        return torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


class Attention:
    """Causal self-attention. What it keeps of T x T: the probabilities, and the mask of the future."""

    def __init__(self, c_attn: Linear, c_proj: Linear, heads: int):
        self.c_attn, self.c_proj, self.heads = c_attn, c_proj, heads

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Context]:
        B, T, D = x_BTD.shape
        qkv, of_qkv = self.c_attn.forward(x_BTD)
        q_BHTK, k_BHTK, v_BHTK = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in qkv.split(D, dim=2))
        # A batched product wants its matrices in one piece: these copies stay, and `qkv` itself goes.
        q, k_BHKT, v = q_BHTK.contiguous(), k_BHTK.transpose(-2, -1).contiguous(), v_BHTK.contiguous()
        future = torch.ones(1, 1, T, T, dtype=torch.bool, device=x_BTD.device).triu(1)
        score = (q @ k_BHKT / math.sqrt(D // self.heads)).masked_fill(future, float("-inf"))
        p_BHTT = softmax(score)
        y_BTD = (p_BHTT @ v).transpose(1, 2).reshape(B, T, D)
        out, of_out = self.c_proj.forward(y_BTD)
        return out, (of_qkv, q, k_BHKT, v, future, p_BHTT, of_out)

    def backward(self, dout_BTD: Tensor, context: Context) -> Tensor:
        of_qkv, q, k_BHKT, v, future, p_BHTT, of_out = context
        B, T, D = dout_BTD.shape
        dy_BHTK = self.c_proj.backward(dout_BTD, of_out).view(B, T, self.heads, -1).transpose(1, 2)
        dp, dv = dy_BHTK @ v.transpose(-2, -1), p_BHTT.transpose(-2, -1) @ dy_BHTK
        dscore = p_BHTT * (dp - (p_BHTT * dp).sum(-1, keepdim=True))
        dscore = dscore.masked_fill(future, 0) / math.sqrt(D // self.heads)
        dq, dk = dscore @ k_BHKT.transpose(-2, -1), dscore.transpose(-2, -1) @ q
        dqkv = torch.cat([d.transpose(1, 2).reshape(B, T, D) for d in (dq, dk, dv)], dim=2)
        return self.c_attn.backward(dqkv, of_qkv)


class MLP:
    """Up to four times the width, GELU, and down again."""

    def __init__(self, c_fc: Linear, c_proj: Linear):
        self.layers = (c_fc, Gelu(), c_proj)

    def forward(self, x: Tensor) -> tuple[Tensor, Context]:
        contexts = []
        for layer in self.layers:
            x, context = layer.forward(x)
            contexts.append(context)
        return x, tuple(contexts)

    def backward(self, dy: Tensor, context: Context) -> Tensor:
        for layer, of_layer in zip(reversed(self.layers), reversed(context), strict=True):
            dy = layer.backward(dy, of_layer)
        return dy


class Block:
    """Norm, attention, add; norm, MLP, add. An addition keeps nothing: its gradient goes both ways unchanged."""

    def __init__(self, ln_1: LayerNorm, attn: Attention, ln_2: LayerNorm, mlp: MLP):
        self.ln_1, self.attn, self.ln_2, self.mlp = ln_1, attn, ln_2, mlp

    def forward(self, x: Tensor) -> tuple[Tensor, Context]:
        h, of_ln_1 = self.ln_1.forward(x)
        a, of_attn = self.attn.forward(h)
        x = x + a
        h, of_ln_2 = self.ln_2.forward(x)
        m, of_mlp = self.mlp.forward(h)
        return x + m, (of_ln_1, of_attn, of_ln_2, of_mlp)

    def backward(self, dy: Tensor, context: Context) -> Tensor:
        of_ln_1, of_attn, of_ln_2, of_mlp = context
        dy = dy + self.ln_2.backward(self.mlp.backward(dy, of_mlp), of_ln_2)
        return dy + self.ln_1.backward(self.attn.backward(dy, of_attn), of_ln_1)


class CrossEntropy:
    """Mean of -log p(target). Keeps the log-probabilities: as large as the logits."""

    def forward(self, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Context]:
        logp_NV = logits_NV - logits_NV.logsumexp(-1, keepdim=True)
        count = logp_NV.new_tensor(len(targets_N))
        return -logp_NV.gather(1, targets_N[:, None]).sum() / count, (logp_NV, targets_N, count)

    def backward(self, context: Context) -> Tensor:
        logp_NV, targets_N, count = context
        dlogits_NV = logp_NV.exp()
        dlogits_NV[torch.arange(len(targets_N), device=targets_N.device), targets_N] -= 1
        return dlogits_NV / count


class GPT2:
    """The model of `gpt2.model`, with copies of its weights. Dropout is not written out.

    `parameters` are by the names of the original; the head and the token embedding are one of them.
    """

    def __init__(self, original: model.GPT2):
        self.parameters = {name: Parameter(value) for name, value in original.named_parameters()}
        heads = original.size.heads
        self.wte, self.wpe = (Embedding(self.parameters[f"transformer.{name}.weight"]) for name in ("wte", "wpe"))
        self.blocks = [self._block(f"transformer.h.{i}", heads) for i in range(original.size.layers)]
        self.ln_f = LayerNorm(*self._pair("transformer.ln_f"))
        self.lm_head = Linear(self.wte.weight)
        self.loss = CrossEntropy()

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, list[Context]]:
        """The mean loss, and one context per part of the model: embeddings, each block, head and loss."""
        token_embedding, of_wte = self.wte.forward(tokens_BT)
        position_embedding, of_wpe = self.wpe.forward(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        x = token_embedding + position_embedding
        saved = [(of_wte, of_wpe)]
        for block in self.blocks:
            x, context = block.forward(x)
            saved.append(context)  # activation memory grows here
        x, of_ln_f = self.ln_f.forward(x)
        logits_BTV, of_head = self.lm_head.forward(x)
        loss, of_loss = self.loss.forward(logits_BTV.flatten(0, 1), targets_BT.flatten())
        saved.append((of_ln_f, of_head, of_loss))
        return loss, saved

    def backward(self, saved: list[Context]) -> None:
        """Fill every parameter's gradient; `saved` is empty afterwards, each context freed as soon as it is used."""
        of_ln_f, of_head, of_loss = saved.pop()
        (x,) = of_head
        dx = self.lm_head.backward(self.loss.backward(of_loss), of_head).view_as(x)
        dx = self.ln_f.backward(dx, of_ln_f)
        del of_ln_f, of_head, of_loss, x
        for block in reversed(self.blocks):
            dx = block.backward(dx, saved.pop())  # activation memory shrinks here
        of_wte, of_wpe = saved.pop()
        self.wte.backward(dx, of_wte)
        self.wpe.backward(dx.sum(0), of_wpe)

    def _block(self, name: str, heads: int) -> Block:
        ln_1, ln_2 = (LayerNorm(*self._pair(f"{name}.{part}")) for part in ("ln_1", "ln_2"))
        c_attn, c_proj = (Linear(*self._pair(f"{name}.attn.{part}")) for part in ("c_attn", "c_proj"))
        c_fc, down = (Linear(*self._pair(f"{name}.mlp.{part}")) for part in ("c_fc", "c_proj"))
        return Block(ln_1, Attention(c_attn, c_proj, heads), ln_2, MLP(c_fc, down))

    def _pair(self, name: str) -> tuple[Parameter, Parameter]:
        return self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]


def softmax(x: Tensor) -> Tensor:
    """e^x over its sum along the last dimension, shifted by the maximum so that nothing overflows."""
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def clip_gradients(parameters: Iterable[Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; returns the norm before."""
    parameters = list(parameters)
    norm = torch.stack([W.grad.square().sum() for W in parameters]).sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    for W in parameters:
        W.grad = W.grad * factor
    return norm


def adamw(parameters: Iterable[Parameter], t: int, *, lr: float = 3e-4, b1: float = 0.9, b2: float = 0.999,
          eps: float = 1e-8, decay: float = 0.01) -> None:
    """Update number `t`, counted from 1. Decay is decoupled: it pulls at the weight, not through the moments."""
    for W in parameters:
        W.m = b1 * W.m + (1 - b1) * W.grad
        W.v = b2 * W.v + (1 - b2) * W.grad.square()
        m_hat, v_hat = W.m / (1 - b1**t), W.v / (1 - b2**t)  # both began at zero: corrected for that
        W.value -= lr * (m_hat / (v_hat.sqrt() + eps) + decay * W.value)


def step(gpt2: GPT2, tokens_BT: Tensor, targets_BT: Tensor, t: int, *, clip: float = 0.0, lr: float = 3e-4) -> Tensor:
    """One whole training step, number `t` counted from 1; returns the loss before it."""
    loss, saved = gpt2.forward(tokens_BT, targets_BT)
    gpt2.backward(saved)
    parameters = gpt2.parameters.values()
    if clip:
        clip_gradients(parameters, clip)
    adamw(parameters, t, lr=lr)
    for W in parameters:
        W.grad = None
    return loss
