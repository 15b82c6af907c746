"""Ways of getting memory back that PyTorch does not ship: the chunked cross-entropy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def chunked_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunks: int) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T` against `targets`, never holding more than one chunk of logits.

    Each chunk's logits are made, used and dropped, and made again in backward: gradients are exact, the time is that
    of one more forward of the head. N rows are split into `chunks` nearly equal parts.
    """
    def part(hidden, targets):
        return F.cross_entropy(hidden @ weight_VD.t(), targets, reduction="sum")

    total = torch.zeros((), device=hidden_ND.device)
    for hidden, targets in zip(hidden_ND.chunk(chunks), targets_N.chunk(chunks), strict=True):
        total = total + checkpoint(part, hidden, targets, use_reentrant=False)
    return total / targets_N.numel()
