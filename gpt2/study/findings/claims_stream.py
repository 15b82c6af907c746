"""Findings on the second article's first half: the stream, the batch, forward, backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pandas as pd
import torch

from gpt2.memory.ledger import Ledger
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.trace import Category, Trace
from gpt2.step import Recipe
from gpt2.study import flops, recorded, runs
from gpt2.study.findings import activations, streams, updates
from gpt2.study.findings.claims_judged import OTHERWISE, PARTLY, Finding, added, judged, phase_ms
from gpt2.study.recorded import one
from gpt2.study.tables import MIB
from gpt2.study.timing.stream import BF16, FP32

# --- the stream -----------------------------------------------------------------------------------------------------


def _host_ahead() -> Finding:
    lead = recorded.of("05-host-lead", recipe="fp32").iloc[-1]
    ms = lead["device_ms"] - lead["host_ms"]
    kernels = ms / phase_ms("fp32", "step") * recorded.of("05-kernels", recipe="fp32")["kernel_count"].sum()
    return (
        f"fp32: ahead by {ms:.0f} ms, about {kernels:,.0f} kernels, a whole step",
        judged(kernels > 3),
        "05, the lead",
    )


def _forward_kernels() -> Finding:
    fp32, bf16 = (streams.kernel_count(name, "forward") for name in ("fp32", "bf16-sdpa"))
    return f"fp32 {fp32}, bf16 {bf16}", judged(150 <= min(fp32, bf16) and max(fp32, bf16) <= 600), "05, kernels"


def _backward_more() -> Finding:
    forward, backward = (streams.kernel_count("fp32", phase) for phase in ("forward", "backward"))
    return f"fp32 {backward} against {forward}", judged(backward > forward), "05, kernels"


def _unsynchronised() -> Finding:
    rows = recorded.of("05-host-lines", recipe="fp32", phase="forward").set_index("synchronised")
    returned, took = rows.loc[False, "host_ms"], rows.loc[True, "host_ms"]
    return (
        f"fp32 forward: returns after {returned:.0f} ms, takes {took:.0f}",
        judged(returned < took / 2),
        "05, lines",
    )


def _sync_per_step() -> Finding:
    fp32, bf16 = added("fp32", "item"), added("bf16-sdpa", "item")
    verdict = judged(fp32 < 0.02 and bf16 < 0.02, PARTLY if min(fp32, bf16) < 0.02 else OTHERWISE)
    return (
        f"adds {fp32:.1%} in fp32 and {bf16:.0%} in bf16, where the host has no time to spare",
        verdict,
        "05, waiting",
    )


def _sync_per_layer() -> Finding:
    idle = {name: streams.idle_ratio(name, "per layer") for name in ("fp32", "bf16-sdpa")}
    module = streams.idle_ratio("bf16-sdpa", "per module")
    verdict = judged(min(idle.values()) > 0.25, PARTLY if max(*idle.values(), module) > 0.25 else OTHERWISE)
    return (
        f"idle {idle['fp32']:.0%} (fp32), {idle['bf16-sdpa']:.0%} (bf16); one per module, bf16: {module:.0%}",
        verdict,
        "05, waiting",
    )


def _syncing_calls() -> Finding:
    counts = recorded.table("05-sync-counts").set_index("habit")["sync_count"]
    each = {name: int(counts[name]) for name in ("item", "print", "cpu", "nonzero")}
    return (
        ", ".join(f"{name} {n}" for name, n in each.items()) + " syncs",
        judged(min(each.values()) >= 1),
        "05, waiting",
    )


# --- phase 0: the batch ---------------------------------------------------------------------------------------------


def _batch_size() -> Finding:
    tokens = 3 * 32 * 1024 * 8
    return (
        f"ids, labels, masks of 32 x 1,024 in int64: {tokens / 1e6:.1f} MB",
        judged(1e6 < tokens < 1e7, OTHERWISE),
        "05, copies",
    )


def _copy(memory: str, call: str, column: str, what: str = "images 256 x 3 x 224 x 224") -> float:
    return one("05-copies", column, what=what, memory=memory, call=call)


def _pinned_copy() -> Finding:
    held, takes = (_copy("pinned", "non_blocking", c) for c in ("host_ms", "copy_ms"))
    return f"147 MiB: Python held {held:.2f} of {takes:.1f} ms", judged(held < 0.1 * takes), "05, copies"


def _pageable_copy() -> Finding:
    large = _copy("pageable", "non_blocking", "busy_host_ms")
    small = _copy("pageable", "non_blocking", "busy_host_ms", "token ids 32 x 1,024")
    busy = one("05-copies", "busy_ms", what="4 MiB", memory="pinned", call="blocking")
    verdict = judged(small > 0.5 * busy and large > busy, PARTLY if large > busy else OTHERWISE)
    return (
        f"non_blocking, device busy for {busy:.0f} ms: 147 MiB held {large:.0f} ms; 256 KiB {small:.1f} ms, "
        "staged and gone",
        verdict,
        "05, copies",
    )


def _slow_loader() -> Finding:
    late = recorded.of("05-loader", delay_ms=20).set_index("way")["time_ms"]
    prompt = recorded.of("05-loader", delay_ms=0).set_index("way")["time_ms"]
    waits = late["host waits each step"] - prompt["host waits each step"]
    thread = late["loader in a thread"] - prompt["loader in a thread"]
    return f"20 ms late: {waits:+.0f} ms a step; with a thread {thread:+.0f}", judged(waits > 15), "05, a late loader"


# --- phase 1: forward -------------------------------------------------------------------------------------------------


@cache
def _saved(kind: str) -> tuple[int, ...]:
    """Elements of what one layer keeps for backward, its parameters left out; x has 8,192 x 768 elements. Predicted."""
    kept: dict[int, int] = {}
    functional = torch.nn.functional
    with SimulatedGpu("H200"):
        x = torch.empty(8, 1024, 768, device="cuda", requires_grad=True)
        layer = {"linear": torch.nn.Linear(768, 768), "layer norm": torch.nn.LayerNorm(768)}.get(kind)
        layer = layer.cuda() if layer is not None else None
        weights = {p.data_ptr() for p in layer.parameters()} if layer is not None else set()

        def keep(tensor):
            if tensor.data_ptr() not in weights:
                kept[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if layer is not None:
                layer(x)
            elif kind == "gelu":
                functional.gelu(x, approximate="tanh")
            elif kind == "dropout":
                functional.dropout(x, 0.1)
            else:
                q = x.view(8, 1024, 12, 64).transpose(1, 2).to(torch.bfloat16)
                functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return tuple(kept.values())


def _keeps(kind: str, expected: int) -> Callable[[], Finding]:
    def finding() -> Finding:
        large = [n for n in _saved(kind) if n == 8 * 1024 * 768]
        return f"{len(large)} of its size", judged(len(large) == expected == len(_saved(kind))), "02, operators"

    return finding


def _layer_norm_saves() -> Finding:
    small = [n for n in _saved("layer norm") if n == 8 * 1024]
    inputs = len(_saved("layer norm")) - len(small)
    return f"{len(small)} numbers per row, and its input", judged(len(small) == 2 and inputs == 1), "02, operators"


def _attention_saves() -> Finding:
    scores, most = 8 * 12 * 1024 * 1024, max(_saved("attention"))
    return f"largest tensor kept: {most / scores:.0%} of a score matrix", judged(most < scores / 2), "02, operators"


def _layer_estimate() -> Finding:
    rows = activations.sixteen_bits(Recipe())
    each = dict(zip(rows.iloc[:, 0], rows["bytes_per_sbh"], strict=True))
    whole = next(v for name, v in each.items() if "all in bf16" in name and "0.1" in name)
    cast = next(v for name, v in each.items() if "autocast" in name)
    return f"all in bf16 {whole:.2f}; under autocast {cast:.1f}", judged(abs(cast - 34) < 1, PARTLY), "02, 34·s·b·h"


def _of_forward(batch: int) -> int:
    trace = runs.predicted(runs.of_recipe(Recipe(batch=batch)), "H200")
    mark = next(m for m in trace.marks if m.step == 2 and m.name == "forward")
    return _owned(trace, mark.event_count - 1, Category.ACTIVATIONS)


def _owned(trace: Trace, index: int, category: Category) -> int:
    rows = Ledger(trace).at(index).set_index("category")["allocated_bytes"]
    return int(rows[category.value])


def _activations_scale() -> Finding:
    ratio = _of_forward(8) / _of_forward(4)
    return (
        f"batch 4 to 8: {ratio:.3f} times; with length, explicit attention grows as T²",
        judged(1.95 < ratio < 2.05),
        "02",
    )


def _weight_cache() -> Finding:
    trace = runs.predicted(runs.of_recipe(Recipe(precision="bf16", attention="sdpa")), "H200")
    mark = next(m for m in trace.marks if m.step == 2 and m.name == "forward")
    shapes = {tuple(s) for s in updates.shapes_of("124M")} | {
        tuple(s)[::-1] for s in updates.shapes_of("124M")
    }
    cast = sum(
        b.event.requested_bytes
        for b in trace.live_at(mark.event_count - 1)
        if b.event.dtype == "bfloat16" and tuple(b.event.shape) in shapes and "_to_copy" in b.event.operator
    )
    each = cast / updates.parameter_count("124M")
    return f"{each:.2f} at the end of forward; kept until backward has used it", judged(1.8 < each < 2.1), "08"


# --- phase 2: backward ------------------------------------------------------------------------------------------------


def _gemms_per_linear() -> Finding:
    calls = streams.operators(FP32).set_index(["phase", "operator"])["call_count"]
    forward = calls["forward", "aten.addmm"] + calls["forward", "aten.mm"]
    return (
        f"{calls['backward', 'aten.mm']} for {forward} layers",
        judged(calls["backward", "aten.mm"] == 2 * forward),
        "05, FLOPs",
    )


def _flop_ratio(recipe: Recipe) -> float:
    counted = flops.counted(recipe).groupby("phase")["flop_count"].sum()
    return counted["backward"] / counted["forward"]


def _backward_flops() -> Finding:
    explicit, fused = _flop_ratio(FP32), _flop_ratio(BF16)
    times = phase_ms("fp32-sdpa", "backward") / phase_ms("fp32-sdpa", "forward")
    return (
        f"{explicit:.2f}, fused attention {fused:.2f}; in time {times:.2f} (fp32, fused attention)",
        judged(abs(explicit - 2) < 0.01 and abs(fused - 2) < 0.1),
        "05, FLOPs",
    )


def _step_flops() -> Finding:
    explicit, fused = 1 + _flop_ratio(FP32), 1 + _flop_ratio(BF16)
    return (
        f"{explicit:.2f}, fused attention {fused:.2f}",
        judged(abs(explicit - 3) < 0.1 > abs(fused - 3)),
        "05, FLOPs",
    )


@cache
def _backward() -> tuple[pd.DataFrame, int, int]:
    """Owners over the backward of step 2 of the baseline, as recorded; the peak's event, and all events of backward."""
    trace = runs.recorded("base")
    timeline = Ledger(trace).timeline([2])
    return timeline[timeline["phase"] == "backward"], trace.peak([2]), int((timeline["phase"] == "backward").sum())


def _activations_fall() -> Finding:
    column = _backward()[0][Category.ACTIVATIONS.value]
    rises, start = int((column.diff() > 0).sum()), column.iloc[0] / MIB
    return (
        f"from {start:,.0f} to {column.iloc[-1] / MIB:,.0f} MiB, with {rises} rises",
        judged(rises == 0, PARTLY),
        "02, 55 readings",
    )


def _gradients_appear() -> Finding:
    column = _backward()[0][Category.GRADIENTS.value]
    return (
        f"from {column.iloc[0] / MIB:,.0f} to {column.iloc[-1] / MIB:,.0f} MiB",
        judged(column.iloc[0] == 0),
        "02, 55 readings",
    )


def _peak_early() -> Finding:
    rows, peak, count = _backward()
    place = int(rows.index.get_indexer([peak])[0])
    return f"event {place + 1} of {count} of backward", judged(0 <= place < count / 4), "03"


def _peak_at_loss() -> Finding:
    owner = Ledger(runs.recorded("base")).peak_owner([2])
    return (
        f"set by {owner.operator}, {owner.requested_bytes / MIB:,.0f} MiB",
        judged(owner.category == Category.LOSS.value),
        "03",
    )


FINDINGS: dict[str, Callable[[], Finding]] = {
    "host_ahead": _host_ahead,
    "forward_kernels": _forward_kernels,
    "backward_more_kernels": _backward_more,
    "unsynchronized_timing": _unsynchronised,
    "sync_per_step": _sync_per_step,
    "sync_per_layer": _sync_per_layer,
    "syncing_calls": _syncing_calls,
    "batch_size": _batch_size,
    "pinned_copy": _pinned_copy,
    "pageable_copy": _pageable_copy,
    "slow_loader": _slow_loader,
    "linear_saves_input": _keeps("linear", 1),
    "gelu_saves_input": _keeps("gelu", 1),
    "dropout_saves_mask": _keeps("dropout", 1),
    "layer_norm_saves": _layer_norm_saves,
    "fused_attention_saves": _attention_saves,
    "layer_estimate": _layer_estimate,
    "activations_scale": _activations_scale,
    "autocast_weight_cache": _weight_cache,
    "gemms_per_linear": _gemms_per_linear,
    "backward_flops": _backward_flops,
    "step_flops": _step_flops,
    "activations_fall": _activations_fall,
    "gradients_appear": _gradients_appear,
    "peak_early_in_backward": _peak_early,
    "peak_at_loss": _peak_at_loss,
}
