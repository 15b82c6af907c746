"""The options of PYTORCH_CUDA_ALLOC_CONF, as far as they change what the allocator does.

Sources: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.cpp of PyTorch 2.5 to 2.14, and the pull requests
that brought each option (136174, 161035, 172056, 179473).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MIB = 2**20

# option -> (first torch that has it, field of Settings or None where it changes no size)
_OPTIONS: dict[str, tuple[tuple[int, int], str | None]] = {
    "max_split_size_mb": ((1, 8), "max_split_size_mb"),
    "max_non_split_rounding_mb": ((2, 6), "max_non_split_rounding_mb"),
    "garbage_collection_threshold": ((1, 10), "garbage_collection_threshold"),
    "expandable_segments": ((2, 1), "expandable_segments"),
    "roundup_power2_divisions": ((1, 13), "roundup_power2_divisions"),
    "per_process_memory_fraction": ((2, 10), "per_process_memory_fraction"),
    "large_segment_size_mb": ((2, 11), "large_segment_size_mb"),
    "throw_on_cudamalloc_oom": ((2, 12), "throw_on_cudamalloc_oom"),
    "backend": ((2, 0), None),
    "release_lock_on_cudamalloc": ((2, 1), None),
    "expandable_segments_handle_type": ((2, 8), None),
    "pinned_use_cuda_host_register": ((2, 1), None),
    "pinned_num_register_threads": ((2, 1), None),
    "pinned_use_background_threads": ((2, 5), None),
    "pinned_reserve_segment_size_mb": ((2, 9), None),
    "graph_capture_record_stream_reuse": ((2, 9), None),
}


def torch_version(text: str) -> tuple[int, int]:
    """Major and minor of "2.11.0+cu130". Raises ValueError if there is none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if not match:
        raise ValueError(f"not a torch version: {text!r}")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Settings:
    """How the allocator is configured; the defaults are PyTorch's. Sizes in MiB, as the options have them."""

    max_split_size_mb: int | None = None  # blocks of this size and more are never split; None: no such size
    max_non_split_rounding_mb: int = 20  # how much bigger a block a request that big may take
    garbage_collection_threshold: float = 0.0  # share of the limit above which idle segments are freed; 0: off
    expandable_segments: bool = False
    roundup_power2_divisions: tuple[int, ...] = (0,) * 16  # by floor(log2(bytes)) - 20, clamped to 0..15; 0: off
    per_process_memory_fraction: float = 1.0
    large_segment_size_mb: int = 20
    throw_on_cudamalloc_oom: bool = False

    @classmethod
    def parse(cls, text: str, torch: str = "2.11.0") -> Settings:
        """Read "option:value,option:value".

        Raises ValueError, in one line, for an unknown option, a value out of range, or an option that this torch
        does not have yet. Options that change no size are accepted and have no field.
        """
        version, values = torch_version(torch), {}
        for name, value in _pairs(text):
            if name not in _OPTIONS:
                raise ValueError(f"unknown allocator option {name!r}; torch {torch} knows {_known(version)}")
            since, field = _OPTIONS[name]
            if version < since:
                raise ValueError(f"allocator option {name!r} exists since torch {since[0]}.{since[1]}, not in {torch}; "
                                 f"that one knows {_known(version)}")
            if name == "backend" and value != "native":
                raise ValueError(f"allocator backend {value!r} is not modelled; only 'native' is")
            if field:
                values[field] = _READ[field](name, value)
        settings = cls(**values)
        settings._check(version)
        return settings

    def _check(self, version: tuple[int, int]) -> None:
        split, large = self.max_split_size_mb, self.large_segment_size_mb
        if large <= 10:
            raise ValueError(f"allocator option 'large_segment_size_mb' must be above 10, not {large}")
        if split is not None and version >= (2, 9) and split < large:
            raise ValueError(f"allocator option 'max_split_size_mb' must be at least {large}, not {split}")
        if split is not None and version < (2, 9) and split <= 20:
            raise ValueError(f"allocator option 'max_split_size_mb' must be above 20, not {split}")

    @property
    def max_split_bytes(self) -> int:
        return 2**63 if self.max_split_size_mb is None else self.max_split_size_mb * _MIB

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the reader should know about this combination; one sentence each."""
        if self.expandable_segments and self.max_split_size_mb is not None:
            return (f"max_split_size_mb:{self.max_split_size_mb} with expandable_segments:True can make reserved "
                    "memory grow without end: a free block of that size or more serves no smaller request, and the "
                    "segment is extended instead. Use one of the two.",)
        return ()


def _known(version: tuple[int, int]) -> str:
    return ", ".join(name for name, (since, _) in _OPTIONS.items() if version >= since)


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split at the commas outside brackets, then at the first colon."""
    pairs = []
    for item in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)):
        name, colon, value = item.partition(":")
        if item and not (colon and name and value):
            raise ValueError(f"allocator option {item!r} is not of the form option:value")
        if item:
            pairs.append((name, value))
    return pairs


def _whole(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"allocator option {name!r} takes a whole number of MiB, not {value!r}")
    return int(value)


def _truth(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"allocator option {name!r} takes True or False, not {value!r}")
    return value == "True"


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"allocator option {name!r} takes a number, not {value!r}") from None


def _threshold(name: str, value: str) -> float:
    number = _number(name, value)
    if not 0.0 < number < 1.0:
        raise ValueError(f"allocator option {name!r} lies between 0 and 1, both excluded, not {value}")
    return number


def _share(name: str, value: str) -> float:
    number = _number(name, value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"allocator option {name!r} lies between 0 and 1, not {value}")
    return number


def _divisions(name: str, value: str) -> tuple[int, ...]:
    """One number for all sizes, or [256:1,512:2,>:8] with sizes in MiB; see `Settings.roundup_power2_divisions`."""
    if not value.startswith("["):
        return (_division(name, value),) * 16
    if not value.endswith("]"):
        raise ValueError(f"allocator option {name!r} opens a bracket that nothing closes: {value}")
    divisions, last = [0] * 16, None
    for item in value[1:-1].split(","):
        size, _, count = item.partition(":")
        number = _division(name, count)
        if size == ">":
            first = 0 if last is None else last
            divisions[first:] = [number] * (16 - first)
            continue
        mib = _whole(name, size)
        if mib < 1 or mib & (mib - 1):
            raise ValueError(f"allocator option {name!r} takes sizes that are powers of 2 in MiB, not {size}")
        index = min(mib.bit_length() - 1, 15)
        divisions[0 if last is None else index:index + 1] = [number] * (index + 1 if last is None else 1)
        last = index
    return tuple(divisions)


def _division(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) & (int(value) - 1):
        raise ValueError(f"allocator option {name!r} takes 0 or powers of 2, not {value!r}")
    return int(value)


_READ = {
    "max_split_size_mb": _whole, "max_non_split_rounding_mb": _whole, "large_segment_size_mb": _whole,
    "garbage_collection_threshold": _threshold, "per_process_memory_fraction": _share,
    "expandable_segments": _truth, "throw_on_cudamalloc_oom": _truth, "roundup_power2_divisions": _divisions,
}
