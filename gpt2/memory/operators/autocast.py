"""torch.autocast("cuda") on tensors that C++ does not take for CUDA tensors.

The simulated card keeps the AutocastCUDA dispatch key included; `torch.autocast` lifts and drops its exclusion as ever,
and these kernels do the casting. Lists and policies: ATen/autocast_mode.h (a test compares them with the header).
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import torch

aten = torch.ops.aten
_KEY = torch._C.DispatchKey.AutocastCUDA
_BELOW = torch._C.DispatchKeySet(_KEY)

LOWER_PRECISION = (
    "_convolution.deprecated",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
)
FP32 = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
)
FP32_BY_DTYPE = (
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
)
PROMOTE = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
)


class _Casts:
    """The cache of casts: a leaf that requires grad is cast once per outermost autocast block."""

    def __init__(self):
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """autocast_mode.cpp, cached_cast."""
        if not tensor.dtype.is_floating_point or tensor.dtype is torch.float64 or tensor.dtype is dtype:
            return tensor
        keeps = (
            dtype is torch.get_autocast_dtype("cuda")
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not keeps:
            return tensor.to(dtype)
        if id(tensor) not in self.cache:
            self.cache[id(tensor)] = (tensor, tensor.to(dtype))
        return self.cache[id(tensor)][1]


def _mapped(values, change):
    """`values` with `change` done to every tensor; last argument first, as GCC evaluates arguments (a recording
    shows bias, weight, input), elements of a list in order."""
    changed = [
        change(v)
        if isinstance(v, torch.Tensor)
        else _mapped(v[::-1], change)[::-1]
        if isinstance(v, list | tuple)
        else v
        for v in reversed(values)
    ]
    return type(values)(reversed(changed))


def _tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _overload(name: str):
    operator, _, overload = name.partition(".")
    packet = getattr(aten, operator, None)
    return getattr(packet, overload or "default", None) if packet else None


def _lower(function, casts):
    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            dtype = torch.get_autocast_dtype("cuda")
            kwargs = {k: casts.cast(v, dtype) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
            return function(*_mapped(args, lambda t: casts.cast(t, dtype)), **kwargs)

    return kernel


def _fp32(function, casts):
    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            kwargs = {k: casts.cast(v, torch.float32) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
            return function(*_mapped(args, lambda t: casts.cast(t, torch.float32)), **kwargs)

    return kernel


def _by_dtype(function, casts):
    names = [a.name for a in function._schema.arguments]
    place = names.index("dtype")

    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            given = args[place] if len(args) > place else kwargs.get("dtype")
            if given is None and args[0].dtype in (torch.float16, torch.bfloat16):
                args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
            return function(*args, **kwargs)

    return kernel


def _promote(function, casts):
    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            dtypes = {t.dtype for t in _tensors(args) if t.dtype.is_floating_point}
            widest = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cuda")
            return function(*_mapped(args, lambda t: casts.cast(t, widest)), **kwargs)

    return kernel


@contextmanager
def kernels(card):
    """Register the casting kernels while a card is simulated."""
    casts = _Casts()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for names, policy in (
            (LOWER_PRECISION, _lower),
            (FP32, _fp32),
            (FP32_BY_DTYPE, _by_dtype),
            (PROMOTE, _promote),
        ):
            for name in names:
                if (function := _overload(name)) is not None:
                    library.impl(name.removesuffix(".default"), policy(function, casts), "AutocastCUDA")
    real_clear = torch.clear_autocast_cache

    def clear():
        casts.cache.clear()
        real_clear()

    torch.clear_autocast_cache = clear
    try:
        with torch._C._IncludeDispatchKeyGuard(_KEY):
            yield
    finally:
        torch.clear_autocast_cache = real_clear
        library._destroy()
