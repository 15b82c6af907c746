"""How an optimizer's work is cut into kernels, and how many bytes it moves: arithmetic, no GPU.

Kernels that take lists of tensors get their addresses as launch arguments, and those hold only so many. The rule is
that of ATen's MultiTensorApply.cuh: chunks of 65,536 elements, at most 320 chunks and, by how many lists there are,
at most 110, 64, 48, 36 or 30 tensors to a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CHUNK, CHUNKS_PER_LAUNCH = 65_536, 320
TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
FP32 = 4


class Pass(NamedTuple):
    """One kernel's work over all elements: how often it reads and writes each, and from how many lists of tensors."""

    operator: str
    lists: int
    reads: int
    writes: int


# AdamW with fp32 state, as torch.optim writes it: what each implementation does to every element.
UNFUSED = (
    Pass("weight ×= 1 − lr·decay", 1, 1, 1),
    Pass("m.lerp_(gradient)", 2, 2, 1),
    Pass("v ×= β₂", 1, 1, 1),
    Pass("v += (1 − β₂)·gradient²", 3, 2, 1),
    Pass("√v", 2, 1, 1),
    Pass("√v ÷ √(1 − β₂ᵗ)", 1, 1, 1),
    Pass("√v + ε", 1, 1, 1),
    Pass("weight −= step·m/√v", 3, 3, 1),
)
FUSED = (Pass("everything", 4, 4, 3),)
PASSES = {"loop": UNFUSED, "foreach": UNFUSED, "fused": FUSED}


def multi_tensor(sizes: Sequence[int], lists: int) -> int:
    """Launches of one kernel over tensors of these sizes (elements)."""
    most, launches, tensors, chunks = TENSORS_PER_LAUNCH[lists], 0, 0, 0
    for size in sizes:
        if not size:
            continue
        tensors += 1
        of_tensor = -(-size // CHUNK)
        for chunk in range(1, of_tensor + 1):
            chunks += 1
            done = chunk == of_tensor
            if (tensors == most and done) or chunks == CHUNKS_PER_LAUNCH:
                launches, chunks, tensors = launches + 1, 0, 0 if done else 1
    return launches + (chunks > 0)


def adamw_kernels(sizes: Sequence[int], implementation: str) -> int:
    """Kernels of one AdamW update of fp32 parameters of these sizes."""
    passes = PASSES[implementation]
    if implementation == "loop":
        return len(passes) * len(sizes)
    counters = multi_tensor([1] * len(sizes), 1) if implementation == "fused" else 0  # the others count on the host
    return counters + sum(multi_tensor(sizes, step.lists) for step in passes)


def adamw_bytes_per_parameter(implementation: str) -> int:
    """Bytes read and written per parameter by one update, if no cache helps."""
    return FP32 * sum(step.reads + step.writes for step in PASSES[implementation])
