"""PyTorch's fused attention has several implementations; this chooses one by name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


def attention_backend(name: str) -> AbstractContextManager:
    """Inside it `scaled_dot_product_attention` may use only this backend; "" leaves PyTorch its choice.

    Raises ValueError for an unknown name.
    """
    if not name:
        return nullcontext()
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not one of: {', '.join(BACKENDS)}")
    return sdpa_kernel(BACKENDS[name])
