"""Findings on the second article's second half: clipping, the update, the floor, the allocator, the advice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach as default_implementation

from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.trace import Category
from gpt2.study import launches, recorded, runs
from gpt2.study.findings import updates
from gpt2.study.findings.claims_judged import GIVEN, PARTLY, Finding, added, judged, phase_ms
from gpt2.study.recorded import one
from gpt2.study.tables import MIB

# --- phase 3: clipping and update -------------------------------------------------------------------------------------


def _clip_reductions() -> Finding:
    loop = recorded.of("06-clip", model="124M", way="loop").iloc[0]
    reductions = int(loop["kernels"].split(" reduce_kernel")[0].split("; ")[-1])
    grouped = launches.multi_tensor(updates.sizes("124M"), 1)
    tensors = int(loop["tensor_count"])
    return (
        f"loop: {reductions} for {tensors} tensors; default: {grouped} launches for all of them",
        judged(reductions == tensors + 1 and grouped == tensors, PARTLY),
        "06, clipping",
    )


def _clip_syncs() -> Finding:
    count = int(one("06-clip", "sync_count", model="124M", way="default"))
    return f"{count}; 1 with error_if_nonfinite", judged(count == 0), "06, clipping"


def _traffic(passes: str) -> int:
    step = launches.FUSED[0]
    return launches.FP32 * {"read": step.reads, "written": step.writes, "both": step.reads + step.writes}[passes]


def _adamw_bytes(passes: str, expected: int) -> Callable[[], Finding]:
    return lambda: (
        f"{_traffic(passes)} for the fused update; foreach and loop move "
        f"{launches.adamw_bytes_per_parameter('foreach')} in all",
        judged(_traffic(passes) == expected),
        "06, traffic",
    )


def _traffic_1_3b() -> Finding:
    moved = 28 * updates.parameter_count("1.3B") / 1e9
    return (
        f"{moved:.1f} GB for {updates.parameter_count('1.3B'):,} parameters",
        judged(abs(moved - 36) < 1.5),
        "06, traffic",
    )


def _time_1_3b() -> Finding:
    alone, share = (
        one("06-adamw", "busy_ms", model="1.3B", implementation="fused"),
        updates.share_of_limit("1.3B", "fused"),
    )
    whole = one("06-adamw", "update_ms", model="1.3B", implementation="fused")
    return (
        f"kernels {alone:.1f} ms, the call {whole:.1f}; {share:.0%} of the card's copy rate",
        judged(8 < alone < 12),
        "06, traffic",
    )


def _bandwidth() -> Finding:
    return f"this card is another: it copies at {updates.copy_rate() / 1e12:.2f} TB/s", GIVEN, "06, traffic"


def _loop_kernels() -> Finding:
    row = recorded.of("06-adamw", model="124M", implementation="loop").iloc[0]
    each = row["kernel_count"] / row["tensor_count"]
    return f"{each:.0f} per tensor, {row['kernel_count']:,} in all", judged(each >= 3), "06, kernels"


def _foreach_default() -> Finding:
    with SimulatedGpu("H200"):
        parameter = torch.nn.Parameter(torch.empty(8, device="cuda"))
        _, foreach = default_implementation([parameter], differentiable=False)
    return "foreach on a card; the loop on a CPU", judged(foreach), "06, kernels"


def _fused_kernels() -> Finding:
    few, many = (int(one("06-adamw", "kernel_count", model=m, implementation="fused")) for m in ("124M", "1.3B"))
    return (
        f"{few} launches for 124M, {many} for 1.3B: one pass, cut into pieces",
        judged(few == 1, PARTLY),
        "06, kernels",
    )


def _temporaries() -> Finding:
    copies = {i: m["later"] / m["weights"] for (model, i), m in updates.memory().items() if model == "124M"}
    return (
        ", ".join(f"{i} {n:.2f}" for i, n in copies.items()) + " copies of the weights",
        judged(copies["foreach"] > 0.9),
        "06, memory",
    )


def _lazy_state() -> Finding:
    trace = runs.recorded("base")
    born = [b.event for b in trace.blocks() if b.event.category == Category.OPTIMIZER.value]
    each = len(born) / len(updates.sizes("124M"))
    return f"{each:.0f} per tensor, made in step {min(e.step for e in born)}", judged(each == 2), "06, state"


# --- phase 4, allocator, guidance -------------------------------------------------------------------------------------


def _set_to_none() -> Finding:
    rows = recorded.of("06-zero-grad", recipe="fp32").set_index("set_to_none")["floor_bytes"]
    return (
        f"None gives {(rows[False] - rows[True]) / MIB:,.0f} MiB back, zeros none",
        judged(rows[True] < rows[False]),
        "06, the floor",
    )


def _floor() -> Finding:
    row = recorded.of("06-zero-grad", recipe="bf16-sdpa", set_to_none=True).iloc[0]
    each = row["floor_bytes"] / row["parameter_count"]
    return f"{each:.2f}, workspaces and rounding included", judged(12 <= each < 13), "06, the floor"


def _window_floor() -> Finding:
    rows = recorded.of("06-accumulation", recipe="micro-batches of 8").set_index("accumulate")["peak_bytes"]
    each = (rows[2] - rows[1]) / updates.parameter_count("124M")
    return f"the window adds {each:.2f} to the peak", judged(3.9 < each < 4.3), "06, accumulation"


def _outside() -> Finding:
    row = recorded.table("05-outside").iloc[0]
    context = (row["used_bytes"] - row["reserved_bytes"]) / MIB
    matches = abs(row["nvidia_smi_mib"] - row["used_bytes"] / MIB) < 1
    return f"nvidia-smi {row['nvidia_smi_mib']:,} MiB: reserved and {context:,.0f}", judged(matches), "05, outside"


def _worst(name: str) -> float:
    """Most that was reserved over most that was allocated, in ten steps of different lengths."""
    marks = runs.recorded(name).marks
    return max(m.max_reserved_bytes for m in marks) / max(m.max_allocated_bytes for m in marks)


def _fragmentation() -> Finding:
    return (
        f"lengths 256 to 1,024: reserved {_worst('variable-native'):.2f} times allocated",
        judged(_worst("variable-native") > 1.2, PARTLY),
        "09",
    )


def _expandable() -> Finding:
    native, expandable = _worst("variable-native"), _worst("variable-expandable")
    return f"{native:.2f} becomes {expandable:.2f}", judged(expandable < native), "09"


def _history_entries() -> Finding:
    events = sum(e.step == 2 for e in runs.recorded("base").events)
    return f"a step of ours has {events:,} events: room for {100_000 // events} steps", GIVEN, "03"


def _item_every() -> Finding:
    return (
        f"a sync in 50 steps adds {added('bf16-sdpa', 'item') / 50:.1%} (bf16)",
        judged(added("bf16-sdpa", "item") / 50 < 0.01),
        "05, waiting",
    )


def _checkpoint_cost() -> Finding:
    extra = phase_ms("fp32-checkpoint", "backward") - phase_ms("fp32", "backward")
    ratio = extra / phase_ms("fp32", "forward")
    return (
        f"{ratio:.2f} forwards (fp32): head and last layers are not run again",
        judged(0.85 < ratio < 1.15, PARTLY),
        "05, time",
    )


def _small_batches() -> Finding:
    rows = recorded.of("06-accumulation", recipe="32 sequences cut").set_index("batch")["tokens_per_second"]
    return (
        f"tokens a second at 32, 8, 1: {rows[32]:,}, {rows[8]:,}, {rows[1]:,}",
        judged(rows[1] < rows[8] < rows[32]),
        "06, accumulation",
    )


def _steps_to_profile() -> Finding:
    marks = [m for m in runs.recorded("base").marks if m.name == "zero_grad"]
    peaks = [m.max_allocated_bytes for m in marks]
    return (
        f"the peak of step {len(peaks)} is that of step 2, to the byte",
        judged(peaks[-1] == peaks[1] != peaks[0]),
        "01",
    )


FINDINGS: dict[str, Callable[[], Finding]] = {
    "clip_reductions": _clip_reductions,
    "clip_syncs": _clip_syncs,
    "adamw_read": _adamw_bytes("read", 16),
    "adamw_written": _adamw_bytes("written", 12),
    "adamw_traffic": _adamw_bytes("both", 28),
    "adamw_traffic_1_3b": _traffic_1_3b,
    "adamw_time_1_3b": _time_1_3b,
    "bandwidth": _bandwidth,
    "loop_kernels": _loop_kernels,
    "foreach_default": _foreach_default,
    "fused_kernels": _fused_kernels,
    "grouped_temporaries": _temporaries,
    "lazy_state": _lazy_state,
    "set_to_none_default": _set_to_none,
    "floor": _floor,
    "accumulation_floor": _window_floor,
    "reserved_and_context": _outside,
    "fragmentation": _fragmentation,
    "expandable_segments": _expandable,
    "history_entries": _history_entries,
    "item_every": _item_every,
    "checkpoint_cost": _checkpoint_cost,
    "small_batches_slow": _small_batches,
    "steps_to_profile": _steps_to_profile,
}
