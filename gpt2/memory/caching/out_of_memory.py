"""Out of memory: what was asked, what there was, and the message PyTorch would print.

Source of the wording: the end of malloc in c10/cuda/CUDACachingAllocator.cpp (2.6), and messages of torch 2.10
and later, which name PYTORCH_ALLOC_CONF where earlier ones name PYTORCH_CUDA_ALLOC_CONF.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from gpt2.memory.caching.settings import torch_version

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


def format_size(size: int) -> str:
    """Bytes as PyTorch prints them: "512 bytes", "2.00 MiB"; exactly 1 GiB is "1024.00 MiB"."""
    if size <= _KIB:
        return f"{size} bytes"
    for unit, name in ((_KIB, "KiB"), (_MIB, "MiB")):
        if size <= unit * _KIB:
            return f"{size / unit:.2f} {name}"
    return f"{size / _GIB:.2f} GiB"


@dataclass(eq=False)
class OutOfMemory(Exception):
    """The allocator could not serve a request. All in bytes; `limit_bytes` is None where no fraction was set."""

    requested_bytes: int
    rounded_bytes: int
    segment_bytes: int  # what the message says was tried: the whole segment
    allocated_bytes: int
    reserved_bytes: int
    free_device_bytes: int
    total_bytes: int
    limit_bytes: int | None
    torch: str = "2.11.0"

    def __post_init__(self) -> None:
        self.args = astuple(self)  # so that it survives pickling: failed runs come out of child processes

    def __str__(self) -> str:
        return self.message()

    def message(self, gpu_index: int = 0) -> str:
        """PyTorch's sentences. "This process" is all that is in use: nobody else is on a simulated card."""
        if self.requested_bytes >= 2**60:
            return "CUDA out of memory. Tried to allocate more than 1EB memory."
        in_use = format_size(self.total_bytes - self.free_device_bytes)
        allowed = "" if self.limit_bytes is None else f"{format_size(self.limit_bytes)} allowed; "
        variable = "PYTORCH_ALLOC_CONF" if torch_version(self.torch) >= (2, 10) else "PYTORCH_CUDA_ALLOC_CONF"
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.segment_bytes)}. "
            f"GPU {gpu_index} has a total capacity of {format_size(self.total_bytes)} "
            f"of which {format_size(self.free_device_bytes)} is free. "
            f"Including non-PyTorch memory, this process has {in_use} memory in use. {allowed}"
            f"Of the allocated memory {format_size(self.allocated_bytes)} is allocated by PyTorch, "
            f"and {format_size(self.reserved_bytes - self.allocated_bytes)} is reserved by PyTorch but unallocated. "
            f"If reserved but unallocated memory is large try setting {variable}=expandable_segments:True "
            "to avoid fragmentation.  See documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )
