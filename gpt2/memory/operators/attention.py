"""Operators whose CUDA path PyTorch chooses by looking at the device: attention, dropout, half-precision softmax.

On meta tensors the composite takes the CPU's way; these kernels, registered above autograd's own, take the card's.
What the chosen attention kernels allocate is in `gpt2/memory/kernels/attention.py`.
"""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager

import torch
from torch.nn import functional as F

from gpt2.memory.operators import composites, recurrent

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def backend(card, q, k, v, mask, dropout: float, is_causal: bool, gqa: bool) -> str:
    """The kernel that `scaled_dot_product_attention` would run: "cudnn", "flash", "efficient" or "math".

    sdp_utils.cpp: use_flash_attention, use_mem_efficient_attention, use_cudnn_attention and the priority order.
    """
    order = ("flash", "efficient", "math", "cudnn")
    if card.software.cudnn_attention_first:
        order = ("cudnn", *order[:3])
    tests = {"cudnn": _cudnn_takes, "flash": _flash_takes, "efficient": _efficient_takes, "math": lambda *_: True}
    enabled = {
        "cudnn": torch._C._get_cudnn_sdp_enabled,
        "flash": torch._C._get_flash_sdp_enabled,
        "efficient": torch._C._get_mem_efficient_sdp_enabled,
        "math": torch._C._get_math_sdp_enabled,
    }
    for name in order:
        if enabled[name]() and tests[name](card, q, k, v, mask, dropout, gqa):
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


def _plain(q, k, v, mask) -> bool:
    """check_last_dim_stride_equals_1_dense and check_nonzero_sequence_lengths_dense; the mask's stride counts, too."""
    dense = all(t is None or t.stride(-1) == 1 for t in (q, k, v, mask))
    return q.dim() == 4 and dense and 0 not in q.shape and 0 not in k.shape


def _heads_fit(q, k, v, gqa) -> bool:
    """check_batch_size_and_num_heads_dense: one batch size, as many heads or, if told so, a divisor of them."""
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return False
    return k.shape[1] == v.shape[1] and (q.shape[1] == k.shape[1] or gqa and q.shape[1] % k.shape[1] == 0)


def _mask_fits(q, k, mask) -> bool:
    """check_attn_mask_shape: two dimensions or four, each the scores' or 1."""
    if mask is None:
        return True
    scores = (*q.shape[:3], k.shape[2])
    return mask.dim() in (2, 4) and all(m in (1, n) for m, n in zip(mask.shape, scores[-mask.dim() :], strict=True))


def _cudnn_takes(card, q, k, v, mask, dropout, gqa) -> bool:
    widest = 256 if card.gpu.capability[0] == 9 else 128
    return (
        _plain(q, k, v, mask)
        and _heads_fit(q, k, v, gqa)
        and _mask_fits(q, k, mask)
        and card.gpu.capability >= (8, 0)
        and q.dtype in _HALVES
        and q.shape[-1] % 8 == 0
        and v.shape[-1] % 8 == 0
        and q.shape[-1] <= widest
        and v.shape[-1] <= widest
        and (mask is None or mask.dtype != torch.bool and not mask.requires_grad)
        and q.shape[-2] > 1
    )


def _flash_takes(card, q, k, v, mask, dropout, gqa) -> bool:
    return (
        _plain(q, k, v, mask)
        and card.gpu.capability >= (8, 0)
        and q.dtype in _HALVES
        and mask is None
        and q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
        and _heads_fit(q, k, v, gqa)
    )


def _efficient_takes(card, q, k, v, mask, dropout, gqa) -> bool:
    aligned = 8 if q.dtype in _HALVES and card.gpu.capability >= (7, 5) else 4 if card.gpu.capability >= (8, 0) else 1
    return (
        _plain(q, k, v, mask)
        and not gqa
        and _heads_fit(q, k, v, gqa)
        and q.shape[-1] % aligned == 0
        and v.shape[-1] % aligned == 0
        and (q.dtype is not torch.bfloat16 or card.gpu.capability >= (8, 0))
    )


def _attention(card):
    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        mask = additive(attn_mask, query)
        choice = backend(card, query, key, value, mask, dropout_p, is_causal, enable_gqa)
        if mask is not None and choice == "efficient":
            mask = _aligned(mask)
        if mask is not None and mask.dim() == 4 and choice in ("cudnn", "efficient"):
            mask = mask.expand(query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if choice == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, keep, dropout_p, is_causal, False, scale=scale
            )[0]
        if choice == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if choice == "efficient":
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, keep, dropout_p, is_causal, scale=scale
            )[0]
        return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)

    return attention


def _flash(query, key, value, dropout, is_causal, scale):
    """attention.cpp, pad_last_dim: head widths are padded to a multiple of 8."""
    width = query.shape[-1]
    scale = scale if scale is not None else 1 / math.sqrt(width)
    if width % 8:
        query, key, value = (F.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, False, scale=scale)[0]
    return out[..., :width] if width % 8 else out


def _math(query, key, value, mask, dropout, is_causal, scale, gqa):
    """attention.cpp, _scaled_dot_product_attention_math, operator by operator: C++ adds the mask out of place for
    tensors like ours, in place for a card's. 16-bit inputs are computed in fp32; of a call's
    arguments the last comes first."""
    dtype = query.dtype
    widen = dtype in _HALVES and not torch._C._get_math_sdp_allow_fp16_bf16_reduction()
    if widen:
        query, key, value = query.float(), key.float(), value.float()
    given = query, key, value  # held to the end
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))
    query = query * factor
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    mask = additive(mask, query)
    if gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = torch.matmul(query, key.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    scores = aten._safe_softmax(scores, -1)
    if dropout:
        scores = F.dropout(scores, dropout, True)
    narrow = scores.to(dtype)  # the second result, that nobody keeps
    out = torch.matmul(scores, value).to(dtype)
    del narrow, given
    return out


def _aligned(mask):
    """attention.cpp, preprocess_mask: rows that do not begin at a multiple of 8 elements are padded."""
    if all(stride % 8 == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1:
        return mask
    width = mask.shape[-1]
    return F.pad(mask, (0, 8 - width % 8))[..., :width]


def additive(mask, query):
    """attention.cpp, convert_boolean_attn_mask: True becomes 0, False minus infinity."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.full((), float("-inf"), dtype=query.dtype, device=query.device))


def _dropout(x, p, train):
    """Dropout.cpp: CUDA has a fused kernel that keeps a bool mask."""
    if not train or p == 0 or not x.numel():
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    return aten.native_dropout(x, p, train)[0]


def _softmax_like(inner):
    def softmax(x, dim, dtype=None):
        """SoftMax.cpp: fp16 in, fp32 out is one kernel on CUDA; every other pair of types is a cast first."""
        if x.dtype is torch.float16 and dtype is torch.float32:
            return inner(x, dim, True)
        return inner(x if dtype is None else x.to(dtype), dim, False)

    return softmax


@contextmanager
def kernels(card):
    """Register the card's paths while it is simulated."""
    library = torch.library.Library("aten", "IMPL")
    paths = {
        "scaled_dot_product_attention": _attention(card),
        "dropout": _dropout,
        "softmax.int": _softmax_like(aten._softmax),
        "log_softmax.int": _softmax_like(aten._log_softmax),
        **composites.paths(card),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in paths.items():
            library.impl(name, function, "AutogradMeta")
    real_flatten, torch.nn.RNNBase.flatten_parameters = (
        torch.nn.RNNBase.flatten_parameters,
        recurrent.flatten_parameters,
    )
    try:
        yield
    finally:
        torch.nn.RNNBase.flatten_parameters = real_flatten
        library._destroy()
