"""Read the out-of-memory messages that PyTorch has printed since 1.0.

The wordings, in our own words:
  up to 1.3    (GPU 0; T total capacity; A already allocated; F free; U cached), U being unused
  up to 2.0    the same with "L allowed; " where a fraction is set, and "R reserved in total by PyTorch"
  2.1          GPU 0 has a total capac(i)ty of T of which F is free. Process 7 has ... / this process has ...
               Of the allocated memory A is allocated by PyTorch, and U is reserved by PyTorch but unallocated
  later        the same, and "with P allocated in private pools (e.g., CUDA Graphs)"
  any          "more than 1EB memory"; cudaMallocAsync's table; and, with no sizes, the driver, cuBLAS and cuDNN
Sources: c10/cuda/CUDACachingAllocator.cpp and CUDAMallocAsyncAllocator.cpp, and messages people posted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_UNKNOWN = 2**60  # NVML's and the allocator's "no value" print as 17179869184.00 GiB
# Every repetition is bounded, so that no text, however long, takes more than linear time.
_SIZE = r"(\d{1,20}(?:\.\d{1,9})?) ?(bytes|KiB|MiB|GiB)"
_START = re.compile(rf"\b(\w{{1,12}}) out of memory\. Tried to allocate (?:{_SIZE}|more than (1EB) memory)")
_ASYNC = re.compile(rf"Allocation on device (\d{{1,4}}) would exceed allowed memory.{{0,300}}?Requested ?: {_SIZE}")
_FIELDS = {
    "total_bytes": rf"{_SIZE} total capacity|total capaci?ty of {_SIZE}|Device limit ?: {_SIZE}",
    "free_bytes": rf"; {_SIZE} free|of which {_SIZE} ?is free|Free \(according to \w+\) ?: {_SIZE}",
    "allocated_bytes": rf"{_SIZE} already allocated|{_SIZE} is allocated by PyTorch|Currently allocated ?: {_SIZE}",
    "allowed_bytes": rf"{_SIZE} allowed;|user-supplied memory fraction\) ?: {_SIZE}",
    "private_bytes": rf"with {_SIZE} allocated in private pools",
    "unallocated_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated|{_SIZE} cached\)",
    "reserved_bytes": rf"{_SIZE} reserved in total by PyTorch",
    "this_process_bytes": rf"this process has {_SIZE} memory in use",
}
_WITHOUT_SIZES = (
    ("cuBLAS", re.compile(r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|rocblas_status_memory_error", re.I)),
    ("cuDNN", re.compile(r"CUDNN_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)", re.I)),
    ("driver", re.compile(r"(?:CUDA|HIP) error: out of memory|cuda runtime error \(2\)|CUDA_ERROR_OUT_OF_MEMORY|"
                          r"cudaErrorMemoryAllocation|hipErrorOutOfMemory|failure (?:2 )?'out of memory'", re.I)),
    ("allocator", re.compile(r"\b(?:CUDA|HIP|XPU) out of memory", re.I)),
)
_HOST = re.compile(r"DefaultCPUAllocator|not enough memory: you tried|Cannot allocate memory|MPS backend out of memory")


@dataclass(frozen=True)
class OomMessage:
    """What a message says. Sizes in bytes, None where it does not say; they carry the two decimals it prints."""

    source: str  # "allocator" | "cudaMallocAsync" | "driver" | "cuBLAS" | "cuDNN"
    backend: str = "CUDA"
    requested: str = ""  # as printed: "394.00 MiB"; "more than 1 EiB" for a size no machine has
    requested_bytes: int | None = None  # of the segment, not of the tensor: see `explain`
    gpu: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None  # of the device, as the driver says
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    unallocated_bytes: int | None = None  # reserved, but in no tensor
    private_bytes: int | None = None
    allowed_bytes: int | None = None
    this_process_bytes: int | None = None
    processes: tuple[tuple[int, int | None], ...] = ()  # (pid, bytes) of the others it names
    repeats: int = 1  # how many such messages the text holds; the first one is read

    @property
    def room_bytes(self) -> int:
        """What the driver would still have given: the card's free memory, or what a limit leaves of it."""
        free = self.free_bytes or 0
        if self.allowed_bytes is None or self.reserved_bytes is None:
            return free
        return max(0, min(free, self.allowed_bytes - self.reserved_bytes))


def read(text: str) -> OomMessage:
    """The first out-of-memory message in `text` (a line, a traceback, a log).

    Raises ValueError, in one line, if there is none, or if it is about the host's memory.
    """
    flat = re.sub(r"\s+", " ", text)
    starts = list(_START.finditer(flat)) or list(_ASYNC.finditer(flat))
    if starts:
        until = starts[1].start() if len(starts) > 1 else len(flat)
        return _with_sizes(starts[0], flat[starts[0].start():until], len(starts))
    for source, pattern in _WITHOUT_SIZES:
        if found := list(pattern.finditer(flat)):
            return OomMessage(source, "HIP" if "hip" in found[0][0].lower() else "CUDA", repeats=len(found))
    if _HOST.search(flat):
        raise ValueError("this message is about the host's memory, not a GPU's: the caching allocator is not in it")
    shown = flat.strip()[:60] or "nothing"
    raise ValueError(f"not an out-of-memory message of PyTorch: {shown!r}")


def _with_sizes(start: re.Match, body: str, repeats: int) -> OomMessage:
    if start.re is _ASYNC:
        source, backend, gpu, number, unit, endless = "cudaMallocAsync", "CUDA", start[1], start[2], start[3], None
    else:
        source, (backend, number, unit, endless), gpu = "allocator", start.groups(), None
    sizes = {name: _find(pattern, body) for name, pattern in _FIELDS.items()}
    reserved, unallocated, allocated = (sizes[n] for n in ("reserved_bytes", "unallocated_bytes", "allocated_bytes"))
    if allocated is not None:
        if reserved is None and unallocated is not None:
            sizes["reserved_bytes"] = allocated + unallocated
        if unallocated is None and reserved is not None:
            sizes["unallocated_bytes"] = max(0, reserved - allocated)
    named = re.search(r"(?:GPU|Device|NPU|MLU) (\d{1,4})\b", body)
    return OomMessage(
        source, backend,
        requested="more than 1 EiB" if endless else f"{number} {unit}",
        requested_bytes=2**60 if endless else _bytes(number, unit),
        gpu=int(gpu or named[1]) if gpu or named else None,
        processes=tuple((int(p), _known(_bytes(n, u)))
                        for p, n, u in re.findall(rf"Process (\d{{1,20}}) has {_SIZE} memory in use", body)),
        repeats=repeats, **sizes)


def _find(pattern: str, body: str) -> int | None:
    match = re.search(pattern, body)
    if match is None:
        return None
    number, unit = [group for group in match.groups() if group is not None]
    return _known(_bytes(number, unit))


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def _known(size: int) -> int | None:
    return size if size < _UNKNOWN else None
