"""What a PyTorch release does behind its operators' backs: workspaces, attention backends, random state.

One frozen record per release range. Each field names the change that set it; reading a field is how the rest of
the simulator asks "which torch is this?".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpt2.memory.gpus import Gpu

KNOWN = ("2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1")

HOPPER_WORKSPACE = 33_554_432  # :4096:8 KiB
OTHER_WORKSPACE = 8_519_680  # :4096:2:16:8 KiB
CUBLASLT_WORKSPACE = 1_048_576  # CUBLASLT_WORKSPACE_SIZE, 1024 KiB


def version(text: str) -> tuple[int, int]:
    """(2, 11) of "2.11.0+cu130". ValueError if it is no release from 2.5 on."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if not match or (release := (int(match[1]), int(match[2]))) < (2, 5):
        raise ValueError(f"torch {text!r} is not a release from 2.5 on; known: {', '.join(KNOWN)}")
    return release


@dataclass(frozen=True)
class Software:
    """The rules of one release on one card."""

    torch: str
    release: tuple[int, int]
    cublas_workspace_bytes: int
    cublaslt: str  # "transient", "persistent" or "unified" with cuBLAS's own
    flash_random_state_on_gpu: bool
    cudnn_attention_first: bool
    reduce_vector_16bit: int  # input vector width of 16-bit sums


def software(torch: str, gpu: Gpu) -> Software:
    """The rules that `torch` follows on `gpu`.

    Sources: aten/src/ATen/cuda/CUDABlas.cpp and CublasHandlePool.cpp for workspaces (Hopper's larger one tests the
    capability (9, 0) up to 2.13 and major 9 to 12 from 2.14; cuBLASLt's is made and freed by each call up to 2.8,
    kept from 2.9, and shared with cuBLAS's from 2.14), flash_api.cpp for the random state (on the GPU from 2.8),
    sdp_utils.cpp for cuDNN's rank (first on capability 9.0 and 10.x from 2.9), Reduce.cuh for vector widths.
    """
    release = version(torch)
    large = gpu.capability == (9, 0) if release < (2, 14) else gpu.capability[0] in (9, 10, 11, 12)
    return Software(
        torch=torch,
        release=release,
        cublas_workspace_bytes=HOPPER_WORKSPACE if large else OTHER_WORKSPACE,
        cublaslt="transient" if release < (2, 9) else "persistent" if release < (2, 14) else "unified",
        flash_random_state_on_gpu=release >= (2, 8),
        cudnn_attention_first=release >= (2, 9) and gpu.capability in ((9, 0), (10, 0), (10, 3)),
        reduce_vector_16bit=8 if release >= (2, 11) else 4,
    )
