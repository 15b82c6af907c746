"""Ways of getting memory back that PyTorch does not ship ready-made.

A cross-entropy in chunks, and liger-kernel's where it is installed; an AdamW with 16-bit moments; an optimizer that
steps while backward still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adamw import adamw

LIGER_RELEASE = "0.8.5"  # of liger-kernel, the one that was run


def chunked_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunks: int) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T` against `targets`, with the logits of one chunk of rows at a time.

    Args:
        hidden_ND: what the head reads, one row per token.
        weight_VD: the head.
        targets_N: the right token of each row.
        chunks: parts into which the rows are split, as equal as `Tensor.chunk` makes them; more than N means N.

    A chunk's gradient is taken as soon as its logits exist, in the forward pass, and only the gradients of `hidden`
    (N, D) and `weight` (V, D) are kept for backward, which scales them. Nothing is computed twice, and gradients are
    those of the plain loss up to the order of summation. Beyond what is kept, the peak is three times one chunk's
    logits. Without gradients (validation) only the loss is computed. Not differentiable twice.

    Raises ValueError for fewer than one chunk or rows that do not match the targets.
    """
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, not {chunks}")
    if len(hidden_ND) != len(targets_N):
        raise ValueError(f"{len(hidden_ND)} rows of hidden states, but {len(targets_N)} targets")
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad):
        return _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, targets_N, chunks)
    parts = zip(hidden_ND.chunk(chunks), targets_N.chunk(chunks), strict=True)
    return sum(_loss_sum(hidden, weight_VD, targets) for hidden, targets in parts) / len(targets_N)


def _loss_sum(hidden_nD: Tensor, weight_VD: Tensor, targets_n: Tensor) -> Tensor:
    return F.cross_entropy(hidden_nD @ weight_VD.t(), targets_n, reduction="sum")


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, chunks):
        weight = weight_VD.detach().requires_grad_()
        grad_hidden, grad_weight = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD)
        total = torch.zeros((), device=hidden_ND.device, dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
        parts = zip(hidden_ND.chunk(chunks), targets_N.chunk(chunks), grad_hidden.chunk(chunks), strict=True)
        for hidden, targets, grad_part in parts:
            hidden = hidden.detach().requires_grad_()
            with torch.enable_grad():
                loss = _loss_sum(hidden, weight, targets)
            of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))
            total += loss.detach()
            grad_part.copy_(of_hidden)
            grad_weight += of_weight
            del of_hidden, of_weight, loss
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.rows = len(targets_N)
        return total / ctx.rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_loss / ctx.rows
        return grad_hidden * scale.to(grad_hidden.dtype), grad_weight * scale.to(grad_weight.dtype), None, None


def check_liger() -> None:
    """ValueError, in one line, where liger-kernel or the Triton that it is written in is not installed."""
    missing = [name for name in ("liger_kernel", "triton") if find_spec(name) is None]
    if missing:
        raise ValueError(f"loss 'liger' wants a GPU and `pip install liger-kernel=={LIGER_RELEASE}`: this Python has "
                         f"no {' and no '.join(missing)}")


def liger_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """The loss of `chunked_cross_entropy` by liger-kernel, which chooses the chunks itself.

    Each has D / V of the rows, rounded up to a power of two, so that its logits are about as many as hidden values.
    Raises ValueError on a simulated GPU: Triton kernels need values.
    """
    if hidden_ND.untyped_storage().device.type == "meta":
        raise ValueError("loss 'liger' is made of Triton kernels, which a simulated GPU cannot run; its peak is near "
                         "that of loss 'chunked' with about V / D chunks")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight_VD, hidden_ND, targets_N)


class AdamWSmallMoments(torch.optim.AdamW):
    """AdamW that stores both moments in bfloat16: 4 bytes of state per parameter instead of 8.

    Each parameter's moments are widened to float32, updated by PyTorch's own AdamW, and rounded back.

    Known risk: bfloat16 keeps 8 significant bits, so a change below 1 part in 512 rounds to none. The second moment
    moves by at most 1 part in 1,000 a step (betas 0.9, 0.999) while gradients shrink: it then stays where it was for
    good, and steps stay too short. Growth below about threefold is lost as well. The first moment moves by up to a
    tenth a step and is only made coarser. Fine for a few steps and for sizing; check the loss curve before trusting
    it with a long run.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            on_device = {"device": parameter.device} if group["fused"] else {}
            state["step"] = torch.zeros((), dtype=torch.float32, **on_device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        first, second = state["exp_avg"].float(), state["exp_avg_sq"].float()
        beta1, beta2 = group["betas"]
        adamw([parameter], [parameter.grad], [first], [second], [], [state["step"]],
              foreach=group["foreach"], fused=group["fused"], amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
              weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"])
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)


class StepInBackward:
    """Updates each parameter the moment its gradient is complete, inside backward, and drops the gradient.

    There is never more than a few gradients at a time, where a step after backward needs all of them at once. What is
    no longer possible: clipping by the global norm, accumulating over micro-batches, unscaling fp16 gradients.

    Args:
        parameters: what is trained.
        optimizer: makes the optimizer of one parameter, such as `lambda ps: torch.optim.AdamW(ps, lr=3e-4)`.

    `step` and `zero_grad` are there so that a training loop need not know; nothing is left for them to do.
    """

    def __init__(self, parameters: Iterable[Tensor], optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]):
        self.optimizers = {parameter: optimizer([parameter]) for parameter in parameters}
        self.handles = [p.register_post_accumulate_grad_hook(self._update) for p in self.optimizers]

    def _update(self, parameter: Tensor) -> None:
        optimizer = self.optimizers[parameter]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Already done."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Already done."""
