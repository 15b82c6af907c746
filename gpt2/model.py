"""GPT-2 from scratch, the training version: no KV cache, returns logits and loss.

The attention is written out with every intermediate tensor under a name of its own, as a first implementation
would be. Names keep memory alive, so they are part of the subject: see notebook 03.

Shape suffixes: B batch, T length, D width, H heads, K width of one head, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpt2.savings import chunked_cross_entropy, liger_cross_entropy


@dataclass(frozen=True)
class Size:
    """Widths and counts of one model."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50_257
    context: int = 1024

    def __post_init__(self):
        for name in ("layers", "width", "heads", "vocabulary", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")


SIZES = {
    "tiny": Size(layers=2, width=32, heads=2, vocabulary=101, context=16),
    "124M": Size(),
    "350M": Size(layers=24, width=1024, heads=16),
    "774M": Size(layers=36, width=1280, heads=20),
    "1558M": Size(layers=48, width=1600, heads=25),
    "1.3B": Size(layers=24, width=2048, heads=16, vocabulary=50_000, context=2048),
}


def size(name: str) -> Size:
    """The size called `name`; ValueError lists the known ones."""
    if name not in SIZES:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(SIZES)}")
    return SIZES[name]


class Attention(nn.Module):
    """Causal self-attention: the T x T matrix in plain sight, or PyTorch's fused one."""

    def __init__(self, size: Size, attention: str, dropout: float):
        super().__init__()
        self.heads, self.attention, self.dropout = size.heads, attention, dropout
        self.c_attn = nn.Linear(size.width, 3 * size.width)
        self.c_proj = nn.Linear(size.width, size.width)
        if attention == "explicit":
            mask = torch.tril(torch.ones(size.context, size.context))
            self.register_buffer("bias", mask.view(1, 1, size.context, size.context))

    def forward(self, x_BTD):
        B, T, D = x_BTD.shape
        c_x = self.c_attn(x_BTD)
        q, k, v = c_x.split(D, dim=2)
        q_BHTK = q.view(B, T, self.heads, -1).transpose(1, 2)
        k_BHTK = k.view(B, T, self.heads, -1).transpose(1, 2)
        v_BHTK = v.view(B, T, self.heads, -1).transpose(1, 2)
        if self.attention == "explicit":
            score = q_BHTK @ k_BHTK.transpose(-2, -1) * (1.0 / math.sqrt(D // self.heads))
            masked_score = score.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            p = F.softmax(masked_score, dim=-1)
            p = F.dropout(p, self.dropout, self.training)
            y = p @ v_BHTK
        else:
            y = F.scaled_dot_product_attention(
                q_BHTK, k_BHTK, v_BHTK, is_causal=True, dropout_p=self.dropout if self.training else 0.0
            )
        y_BTD = y.transpose(1, 2).contiguous().view(B, T, D)
        return F.dropout(self.c_proj(y_BTD), self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers with a GELU (tanh form, as GPT-2 has it) between them."""

    def __init__(self, size: Size, dropout: float):
        super().__init__()
        self.c_fc = nn.Linear(size.width, 4 * size.width)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * size.width, size.width)
        self.dropout = dropout

    def forward(self, x):
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        return F.dropout(x, self.dropout, self.training)


CHECKPOINTS = ("none", "block", "attention", "mlp")  # and "every-2", "every-3", ...


def checkpoint_every(choice: str) -> int:
    """k if whole blocks 0, k, 2k, ... are recomputed ("every-k"; "block" is k = 1), 0 if none is.

    Raises ValueError for an unknown choice.
    """
    if choice in CHECKPOINTS:
        return int(choice == "block")
    prefix, _, k = choice.partition("-")
    if prefix != "every" or not k.isdecimal() or int(k) < 1:
        raise ValueError(f"checkpoint {choice!r} is not one of: {', '.join(CHECKPOINTS)}, every-2, every-3, ...")
    return int(k)


class Block(nn.Module):
    """Norm, attention, add; norm, MLP, add. Each sublayer's input and output keeps its name until the block returns.

    `recompute` names the sublayer, "attention" or "mlp", that keeps only its input and is run again in backward.
    """

    def __init__(self, size: Size, attention: str, dropout: float, recompute: str = "none"):
        super().__init__()
        self.recompute = recompute
        self.ln_1 = nn.LayerNorm(size.width)
        self.attn = Attention(size, attention, dropout)
        self.ln_2 = nn.LayerNorm(size.width)
        self.mlp = MLP(size, dropout)

    def forward(self, x):
        h = self.ln_1(x)
        a = checkpoint(self.attn, h, use_reentrant=False) if self.recompute == "attention" else self.attn(h)
        x = x + a
        h2 = self.ln_2(x)
        m = checkpoint(self.mlp, h2, use_reentrant=False) if self.recompute == "mlp" else self.mlp(h2)
        return x + m


class GPT2(nn.Module):
    """The whole model. The head shares the token embedding's storage.

    `checkpoint`: "none"; "block" (keep only each block's input, recompute the rest in backward); "every-k" (so for
    blocks 0, k, 2k, ...); "attention" or "mlp" (so for that sublayer of every block).
    `loss_chunks`: 0 computes the loss from all logits at once; n > 0 in n chunks, and returns no logits.
    `liger`: the loss is liger-kernel's, and no logits are returned either.
    """

    def __init__(
        self,
        size: Size,
        *,
        attention: str = "explicit",
        dropout: float = 0.0,
        checkpoint: str = "none",
        loss_chunks: int = 0,
        liger: bool = False,
    ):
        super().__init__()
        self.size, self.loss_chunks, self.liger, self.dropout = size, loss_chunks, liger, dropout
        self.checkpoint_every = checkpoint_every(checkpoint)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(size.vocabulary, size.width),
                "wpe": nn.Embedding(size.context, size.width),
                "h": nn.ModuleList(Block(size, attention, dropout, checkpoint) for _ in range(size.layers)),
                "ln_f": nn.LayerNorm(size.width),
            }
        )
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.apply(self._initialise)  # after the layers exist: before them it would initialise nothing

    def _initialise(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens_BT, targets_BT=None):
        """Logits (B, T, V), or None with a chunked or fused loss, and the mean loss, or None without targets."""
        B, T = tokens_BT.shape
        if T > self.size.context:
            raise ValueError(f"length {T} is above the model's context of {self.size.context}")
        positions = torch.arange(T, device=tokens_BT.device)
        token_embedding = self.transformer.wte(tokens_BT)
        position_embedding = self.transformer.wpe(positions)
        x = F.dropout(token_embedding + position_embedding, self.dropout, self.training)
        for i, block in enumerate(self.transformer.h):
            again = self.checkpoint_every and i % self.checkpoint_every == 0
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        x = self.transformer.ln_f(x)
        if self.loss_chunks and targets_BT is not None:
            return None, chunked_cross_entropy(
                x.view(B * T, -1), self.lm_head.weight, targets_BT.reshape(-1), self.loss_chunks
            )
        if self.liger and targets_BT is not None:
            return None, liger_cross_entropy(x.view(B * T, -1), self.lm_head.weight, targets_BT.reshape(-1))
        logits = self.lm_head(x)
        if targets_BT is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets_BT.reshape(-1))
