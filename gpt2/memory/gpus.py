"""The cards, and the software on them, as far as memory can tell them apart.

A profile is a handful of facts, each with its source. Nothing here is fitted to a result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MiB = 2**20
GiB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One model of card.

    `memory_bytes` is what cudaMemGetInfo calls total, `free_bytes_at_start` what it calls free once a process has
    its CUDA context and nothing else: the budget of the caching allocator.
    """

    name: str
    device_name: str  # as torch.cuda.get_device_name() prints it
    memory_bytes: int
    free_bytes_at_start: int
    sms: int
    threads_per_sm: int
    capability: tuple[int, int]
    source: str

    @property
    def context_bytes(self) -> int:
        """What the context, the driver and other processes hold before the first tensor."""
        return self.memory_bytes - self.free_bytes_at_start


# SMs, threads per SM and compute capability: CUDA C++ Programming Guide, "Compute Capabilities", and NVIDIA's
# architecture whitepapers. A context of about 500 MiB is usual with CUDA 12 and 13; where nobody measured it on
# the card itself, the H200's 526.8 MiB stands in and the source line says so.
_H200_CONTEXT = 150_109_880_320 - 149_557_477_376

_GPUS = (
    Gpu(
        "T4",
        "Tesla T4",
        15_360 * MiB - 449 * MiB,
        15_360 * MiB - 449 * MiB - _H200_CONTEXT,
        40,
        1024,
        (7, 5),
        "memory: 15,360 MiB by nvidia-smi less the 449 MiB ECC and driver hold back; SMs: Turing whitepaper; "
        "context: as recorded on an H200",
    ),
    Gpu(
        "A40",
        "NVIDIA A40",
        45_629 * MiB,
        45_440 * MiB,
        84,
        1536,
        (8, 6),
        "memory: 46,068 MiB by nvidia-smi, 44.56 GiB total in PyTorch's messages; "
        "45,440 MiB free at start: published with the A40 study; SMs: GA102 whitepaper",
    ),
    Gpu(
        "A100",
        "NVIDIA A100-SXM4-80GB",
        81_920 * MiB - 669 * MiB,
        81_920 * MiB - 669 * MiB - _H200_CONTEXT,
        108,
        2048,
        (8, 0),
        "memory: 81,920 MiB by nvidia-smi, 79.35 GiB total by cudaMemGetInfo; SMs: A100 whitepaper; "
        "context: as recorded on an H200",
    ),
    Gpu(
        "H100",
        "NVIDIA H100 80GB HBM3",
        81_559 * MiB - 458 * MiB,
        81_559 * MiB - 458 * MiB - _H200_CONTEXT,
        132,
        2048,
        (9, 0),
        "memory: 81,559 MiB by nvidia-smi, 79.2 GiB total by cudaMemGetInfo; SMs: H100 whitepaper; "
        "context: as recorded on an H200",
    ),
    Gpu(
        "H200",
        "NVIDIA H200",
        150_109_880_320,
        149_557_477_376,
        132,
        2048,
        (9, 0),
        "all read on the card: cudaMemGetInfo and cudaDeviceProp, driver 580, CUDA 13.0, 2026",
    ),
    Gpu(
        "RTX 4090",
        "NVIDIA GeForce RTX 4090",
        24_564 * MiB - 354 * MiB,
        24_564 * MiB - 354 * MiB - _H200_CONTEXT,
        128,
        1536,
        (8, 9),
        "memory: 24,564 MiB by nvidia-smi, 23.64 GiB total by cudaMemGetInfo; SMs: Ada whitepaper; "
        "context: as recorded on an H200",
    ),
)


def names() -> list[str]:
    """The cards that can be simulated."""
    return [gpu.name for gpu in _GPUS]


def find(name: str) -> Gpu:
    """The profile called `name` (case, blanks and dashes do not matter). ValueError lists the known ones."""

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    wanted = plain(name)
    for gpu in _GPUS:
        if wanted in (plain(gpu.name), plain(gpu.device_name)):
            return gpu
    raise ValueError(f"unknown GPU {name!r}; known: {', '.join(names())}")


def with_memory(gpu: Gpu, memory_bytes: int) -> Gpu:
    """The same card with other memory, its context as before (an 80 GB H200, say)."""
    return replace(gpu, memory_bytes=memory_bytes, free_bytes_at_start=memory_bytes - gpu.context_bytes)
