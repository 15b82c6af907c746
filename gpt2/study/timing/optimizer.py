"""Timing the end of the step: AdamW three ways, clipping, zero_grad, and accumulation over micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import pandas as pd
import torch

from gpt2.model import GPT2, size
from gpt2.step import OPTIMIZERS, Recipe
from gpt2.study import syncs, timeline
from gpt2.study.timing import stopwatch
from gpt2.study.timing.stream import BF16, FP32, Loop, bandwidth, facts, small

CLIPPING = {"default": {}, "loop": {"foreach": False}, "error_if_nonfinite": {"error_if_nonfinite": True}}
MOVED_BYTES = 28  # per parameter: weight, gradient and both moments read, all but the gradient written


def adamw(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """The update as a loop, in groups and fused: kernels, time on the device and host, memory for a moment.

    The card's own bandwidth is measured before and after, in the same run.
    """
    rows, copied = [], [bandwidth(tiny).assign(when="before")]
    for model in ("tiny",) if tiny else ("124M", "1.3B"):
        for implementation in OPTIMIZERS:
            parameters = parameters_of(model)
            optimizer = torch.optim.AdamW(parameters, lr=3e-4, foreach=implementation == "foreach",
                                          fused=implementation == "fused")
            rows.append({"model": model, "implementation": implementation, "tensor_count": len(parameters),
                         "parameter_count": sum(p.numel() for p in parameters), **_update(optimizer, tiny)})
            del parameters, optimizer
            torch.cuda.empty_cache()
    copied.append(bandwidth(tiny).assign(when="after"))
    return {"06-adamw": pd.DataFrame(rows), "06-bandwidth": pd.concat(copied)}


@cache
def shapes_of(model: str) -> tuple[torch.Size, ...]:
    """The shapes of a model's parameters."""
    with torch.device("meta"):
        return tuple(p.shape for p in GPT2(size(model), attention="sdpa").parameters())


def parameters_of(model: str) -> list[torch.nn.Parameter]:
    """Parameters of the model's shapes, each with a gradient."""
    parameters = [torch.nn.Parameter(0.02 * torch.randn(shape, device="cuda")) for shape in shapes_of(model)]
    for parameter in parameters:
        parameter.grad = 0.001 * torch.randn_like(parameter)
    return parameters


def _update(optimizer: torch.optim.Optimizer, tiny: bool) -> dict:
    """Peak of the first and of later updates above what is held before and after; kernels; times."""
    before = torch.cuda.memory_allocated()
    first = peak(optimizer.step) - before
    held = torch.cuda.memory_allocated()
    later = peak(optimizer.step) - held
    kernels = kernels_of(optimizer.step)
    repeats = 3 if tiny else 20
    return {"state_bytes": held - before, "first_step_extra_bytes": first, "temporary_bytes": later,
            "kernel_count": len(kernels), "busy_ms": kernels["duration_ns"].sum() / 1e6,
            **stopwatch.spread(stopwatch.on_device(optimizer.step, repeats), "update"),
            **stopwatch.spread(stopwatch.on_host(optimizer.step, repeats), "host")}


def peak(function) -> int:
    """Peak of allocated bytes during a call."""
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated()


def kernels_of(function) -> pd.DataFrame:
    """The kernels that one call launches."""
    torch.cuda.synchronize()
    with timeline.profiler() as profile:
        function()
        torch.cuda.synchronize()
    table = timeline.of(profile)
    return table[table["lane"] == "device"]


def clip(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """Clipping to a norm of 1: kernels, time, memory for a moment, and whether the host waits."""
    rows = []
    for model in ("tiny",) if tiny else ("124M", "1.3B"):
        parameters = parameters_of(model)
        for way, options in CLIPPING.items():
            call = partial(torch.nn.utils.clip_grad_norm_, parameters, 1.0, **options)
            call()
            kernels, held = kernels_of(call), torch.cuda.memory_allocated()
            kinds = kernels["name"].map(timeline.short).value_counts()
            rows.append({"model": model, "way": way, "tensor_count": len(parameters), "kernel_count": len(kernels),
                         "busy_ms": kernels["duration_ns"].sum() / 1e6, "temporary_bytes": peak(call) - held,
                         "sync_count": _syncs(call), **stopwatch.spread(stopwatch.on_device(call, 3 if tiny else 20)),
                         "kernels": "; ".join(f"{count} {name}" for name, count in kinds.items())})
        del parameters, call
        torch.cuda.empty_cache()
    return {"06-clip": pd.DataFrame(rows)}


def _syncs(call) -> int | None:
    try:
        return syncs.count(call).count
    except RuntimeError:  # simulated, it would have to know a value
        return None


def zero_grad(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """Gradients given back or filled with zeros: kernels, time, what stays between steps, and the peak."""
    rows = []
    for name, recipe in (("fp32", FP32), ("bf16-sdpa", BF16), ("bf16-sdpa-1", replace(BF16, batch=1))):
        for to_none in (True, False):
            chosen = small(replace(recipe, set_to_none=to_none), tiny)
            loop = Loop(chosen)
            loop.steps(3)
            highest, floor = peak(loop.step), torch.cuda.memory_allocated()
            model, optimizer = loop.training.model, loop.training.optimizer
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            kernels = kernels_of(lambda o=optimizer, n=to_none: o.zero_grad(set_to_none=n))
            times = stopwatch.per_call(loop.step, 2 if tiny else 5, 2 if tiny else 3)
            rows.append({**facts(name, recipe), "set_to_none": to_none, "kernel_count": len(kernels),
                         "busy_ms": kernels["duration_ns"].sum() / 1e6, "floor_bytes": floor, "peak_bytes": highest,
                         "parameter_count": sum(p.numel() for p in model.parameters()), **stopwatch.spread(times)})
            del loop, model, optimizer, parameter
            torch.cuda.empty_cache()
    return {"06-zero-grad": pd.DataFrame(rows)}


def accumulation(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """k micro-batches of 8 to an update, and 32 sequences cut into k: time, tokens a second, peak."""
    rows = []
    for plan, recipe in list(_plans())[:3 if tiny else None]:
        chosen = small(recipe, tiny)
        loop = Loop(chosen)
        loop.steps(3)
        highest = peak(loop.step)
        calls = 2 if tiny else max(2, 8 // recipe.accumulate)
        times = stopwatch.spread(stopwatch.per_call(loop.step, calls, 2 if tiny else 3))
        tokens = recipe.tokens * recipe.accumulate
        rows.append({**facts(plan, recipe), **times, "token_count": tokens, "peak_bytes": highest,
                     "tokens_per_second": round(1000 * tokens / times["time_ms"]) if times["time_ms"] else 0})
        del loop
        torch.cuda.empty_cache()
    return {"06-accumulation": pd.DataFrame(rows)}


def _plans() -> Iterator[tuple[str, Recipe]]:
    for k in (1, 2, 4, 8):
        yield "micro-batches of 8", replace(BF16, accumulate=k)
    for k in (1, 2, 4, 8, 16, 32):
        yield "32 sequences cut", replace(BF16, batch=32 // k, accumulate=k)
