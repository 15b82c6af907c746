"""The same model with other names: what a variable keeps alive while nobody reads it any more.

A variant changes the code of a built model and nothing else: weights, buffers and module names stay.
"""

from __future__ import annotations

import math

from torch.nn import functional as F

from gpt2.model import GPT2, Attention


class OneName(Attention):
    """The explicit attention with one name fewer: `y` is bound again to its own copy in one piece.

    The output of the product with v then dies as soon as it has been copied; under a name of its own it lives until
    attention returns.
    """

    def forward(self, x_BTD):
        B, T, D = x_BTD.shape
        c_x = self.c_attn(x_BTD)
        q, k, v = c_x.split(D, dim=2)
        q_BHTK = q.view(B, T, self.heads, -1).transpose(1, 2)
        k_BHTK = k.view(B, T, self.heads, -1).transpose(1, 2)
        v_BHTK = v.view(B, T, self.heads, -1).transpose(1, 2)
        score = q_BHTK @ k_BHTK.transpose(-2, -1) * (1.0 / math.sqrt(D // self.heads))
        masked_score = score.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        p = F.softmax(masked_score, dim=-1)
        p = F.dropout(p, self.dropout, self.training)
        y = p @ v_BHTK
        y = y.transpose(1, 2).contiguous().view(B, T, D)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


VARIANTS = {"one name": OneName}


def apply(variant: str, model: GPT2) -> None:
    """Give every block's attention the code of a variant; "" leaves the model as it is. KeyError for an unknown one."""
    if variant:
        for block in model.transformer.h:
            block.attn.__class__ = VARIANTS[variant]
