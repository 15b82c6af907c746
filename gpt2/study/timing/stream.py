"""Timing the step as a stream: its kernels, how far the host is ahead of them, phases, ceilings, CUDA graphs."""

from __future__ import annotations

import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace

import pandas as pd
import torch
from torch.autograd.profiler import record_function

from gpt2.step import Recipe, Training, Watch, unwatched
from gpt2.study import timeline
from gpt2.study.timing import stopwatch

FP32 = Recipe(clip=1.0)
BF16 = Recipe(precision="bf16", attention="sdpa", clip=1.0)
STREAMED = {"fp32": FP32, "bf16-sdpa": BF16, "bf16-sdpa-fused": replace(BF16, optimizer="fused")}
TIMED = {
    **STREAMED,
    "fp32-sdpa": replace(FP32, attention="sdpa"),
    "bf16": replace(BF16, attention="explicit"),
    "bf16-sdpa-1": replace(BF16, batch=1),
    "bf16-sdpa-32": replace(BF16, batch=32),
    "bf16-sdpa-checkpoint": replace(BF16, checkpoint="block"),
    "fp32-checkpoint": replace(FP32, checkpoint="block"),
    "1.3B": Recipe(model="1.3B", batch=8, length=2048, precision="bf16", attention="sdpa", optimizer="fused", clip=1.0),
}
FACTS = ("model", "batch", "length", "precision", "attention", "checkpoint", "optimizer", "accumulate")


def small(recipe: Recipe, tiny: bool) -> Recipe:
    """The recipe itself, or its miniature."""
    return replace(recipe, model="tiny", batch=2, length=16) if tiny else recipe


def facts(name: str, recipe: Recipe) -> dict:
    """The first columns of a row about this recipe."""
    return {"recipe": name, **{key: getattr(recipe, key) for key in FACTS}}


class Loop:
    """A Training whose tokens come from pinned host memory in every step, as a loader would bring them."""

    def __init__(self, recipe: Recipe, watch: Watch = unwatched):
        with torch.device("cuda"):  # made where it is used: values are as random, and it takes no seconds
            self.training = Training(recipe, watch=watch)
        self.host = self.training.tokens.cpu().pin_memory()
        self.number = 0

    def step(self) -> torch.Tensor:
        """The next step, copy included."""
        self.number += 1
        with self.training.watch("batch", self.number):
            self.training.tokens = self.host.to("cuda", non_blocking=True)
        return self.training.step(self.number)

    def steps(self, count: int) -> None:
        """Several."""
        for _ in range(count):
            self.step()


@contextmanager
def labelled(phase: str, step: int):
    """A watch that the profiler sees."""
    with record_function(f"{timeline.PHASE}{phase}"):
        yield


def profiled(loop: Loop, steps: int = 1, before=lambda: None) -> pd.DataFrame:
    """The timeline of the loop's next steps; `before` runs at the start of each."""
    with timeline.profiler():  # its own start is slow the first time
        loop.step()
        torch.cuda.synchronize()
    loop.training.watch = labelled
    with timeline.profiler() as profile:
        for _ in range(steps):
            with record_function(f"{timeline.STEP}{loop.number + 1}"):
                before()
                loop.step()
        torch.cuda.synchronize()
    loop.training.watch = unwatched
    return timeline.of(profile)


def compact(table: pd.DataFrame) -> pd.DataFrame:
    """The columns of a timeline that figures need."""
    return table[["step", "lane", "phase", "kind", "start_ns", "duration_ns"]]


def kernels(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """The kernels of one step: a timeline for each recipe, and which kernels there are, by phase."""
    tables, counted = {}, []
    for name, recipe in STREAMED.items():
        loop = Loop(small(recipe, tiny))
        loop.steps(3)
        table = profiled(loop)
        tables[f"05-timeline-{name}"] = compact(table)
        device = table[table["lane"] == "device"].assign(name=lambda t: t["name"].map(timeline.short))
        groups = device.groupby(["phase", "operator", "kind", "name"], sort=False)["duration_ns"].agg(["size", "sum"])
        groups = groups.reset_index().rename(columns={"size": "kernel_count", "sum": "busy_ns"})
        counted.append(pd.concat([pd.DataFrame([facts(name, recipe)] * len(groups)), groups], axis=1))
        del loop
        torch.cuda.empty_cache()
    return {**tables, "05-kernels": pd.concat(counted)}


def host(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """When each line of a step returns, and when the device gets there: unsynchronised, and each line waited for."""
    rows, leads = [], []
    for name in ("fp32", "bf16-sdpa", "bf16-sdpa-fused"):
        recipe = STREAMED[name]
        loop = Loop(small(recipe, tiny))
        loop.steps(3)
        for synchronise in (False, True):
            readings = _lines(loop, synchronise, repeats=3 if tiny else 15)
            for phase, part in readings.groupby("phase", sort=False):
                rows.append({**facts(name, recipe), "synchronised": synchronise, "phase": phase,
                             **stopwatch.spread(list(part["host_ms"]), "host"),
                             **stopwatch.spread(list(part["device_ms"]), "device")})
        leads.append(_leads(loop, steps=4 if tiny else 12).assign(recipe=name))
        del loop
        torch.cuda.empty_cache()
    return {"05-host-lines": pd.DataFrame(rows), "05-host-lead": pd.concat(leads), "05-launch": _launch(tiny)}


def _lines(loop: Loop, synchronise: bool, repeats: int) -> pd.DataFrame:
    rows = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        clock = stopwatch.LineClock(synchronise=synchronise)
        loop.training.watch = clock.watch
        clock.begin(loop.number + 1)
        loop.step()
        torch.cuda.synchronize()
        rows += clock.readings()
    loop.training.watch = unwatched
    return pd.DataFrame(rows)


def _leads(loop: Loop, steps: int) -> pd.DataFrame:
    """Steps in a row without waiting: when the host ended each, and when the device did."""
    torch.cuda.synchronize()
    began, first = time.perf_counter(), torch.cuda.Event(enable_timing=True)
    first.record()
    ends = []
    for _ in range(steps):
        loop.step()
        ends.append((1000 * (time.perf_counter() - began), torch.cuda.Event(enable_timing=True)))
        ends[-1][1].record()
    torch.cuda.synchronize()
    return pd.DataFrame([{"step": i, "host_ms": moment, "device_ms": float(first.elapsed_time(event))}
                         for i, (moment, event) in enumerate(ends, 1)])


def _launch(tiny: bool) -> pd.DataFrame:
    """What launching a kernel costs the host and the device, on a tensor too small to matter."""
    x, count = torch.zeros(1024, device="cuda"), 10 if tiny else 500  # fewer than the queue holds

    def launches():
        for _ in range(count):
            x.add_(1.0)

    held, taken = stopwatch.on_host(launches, 10), stopwatch.on_device(launches, 10)
    times = {**stopwatch.spread(held, "host"), **stopwatch.spread(taken, "device")}
    return pd.DataFrame([{"kernel_count": count, **times}])


def ceilings(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """What the card can do: matrix products, large and as the model has them, and copies, reading and writing."""
    rows = []
    n, m = (64, 32) if tiny else (8192, 8192)
    shapes = {"large square": (n, n, n), "c_attn": (m, 768, 2304), "c_proj": (m, 768, 768), "c_fc": (m, 768, 3072),
              "mlp c_proj": (m, 3072, 768), "lm_head": (m, 768, 50257)}
    for dtype, tf32 in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for name, (rows_, inner, columns) in shapes.items():
            a, b = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((rows_, inner), (inner, columns)))
            times = stopwatch.on_device(lambda a=a, b=b: a @ b, 3 if tiny else 15)
            rows.append({"what": name, "dtype": str(dtype).removeprefix("torch."), "tf32": tf32, "rows": rows_,
                         "inner": inner, "columns": columns, "flop_count": 2 * rows_ * inner * columns,
                         **stopwatch.spread(times)})
    torch.backends.cuda.matmul.allow_tf32 = False
    return {"05-ceilings": pd.DataFrame(rows), "05-bandwidth": bandwidth(tiny)}


def bandwidth(tiny: bool = False) -> pd.DataFrame:
    """Device memory: a copy (one read, one write), a fill (one write), a sum of two (two reads, one write)."""
    count = 2**12 if tiny else 2**30
    a, b, c = (torch.randn(count, device="cuda") for _ in range(3))
    work = {"copy": (lambda: b.copy_(a), 2), "fill": (lambda: b.fill_(1.0), 1),
            "add": (lambda: torch.add(a, b, out=c), 3)}
    return pd.DataFrame([{"what": name, "moved_bytes": passes * 4 * count,
                          **stopwatch.spread(stopwatch.on_device(function, 3 if tiny else 20))}
                         for name, (function, passes) in work.items()])


def phases(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """Device time of each phase, and wall-clock time of a step, steps following each other without waiting."""
    rows = []
    for name, recipe in list(TIMED.items())[:2 if tiny else None]:
        loop = Loop(small(recipe, tiny))
        loop.steps(3)
        torch.cuda.reset_peak_memory_stats()
        repeats = 3 if tiny else 5 if recipe.model == "1.3B" else 7 if recipe.precision == "fp32" else 15
        for phase, part in _durations(loop, repeats).groupby("phase", sort=False):
            rows.append({**facts(name, recipe), "phase": phase, **stopwatch.spread(list(part["ms"]))})
        wall = stopwatch.per_call(loop.step, calls=2 if tiny else 3, rounds=2 if tiny else 3)
        rows.append({**facts(name, recipe), "phase": "step", **stopwatch.spread(wall),
                     "peak_bytes": torch.cuda.max_memory_allocated()})
        del loop
        torch.cuda.empty_cache()
    return {"05-phases": pd.DataFrame(rows)}


def _durations(loop: Loop, steps: int) -> pd.DataFrame:
    """Device time from the end of the line before to the end of each line."""
    clock = stopwatch.LineClock()
    torch.cuda.synchronize()
    loop.training.watch = clock.watch
    for _ in range(steps):
        clock.begin(loop.number + 1)
        loop.step()
    torch.cuda.synchronize()
    loop.training.watch = unwatched
    table = pd.DataFrame(clock.readings())
    table["ms"] = table["device_ms"] - table.groupby("step")["device_ms"].shift().fillna(0.0)
    return table[table["step"] > table["step"].min()]  # the first one finds the device idle


def outside(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """What the process takes on the device beside what the allocator reserves."""
    loop = Loop(small(BF16, tiny))
    loop.steps(2)
    free, total = torch.cuda.mem_get_info()
    row = {"total_bytes": total, "used_bytes": total - free, "reserved_bytes": torch.cuda.memory_reserved(),
           "allocated_bytes": torch.cuda.memory_allocated(), "nvidia_smi_mib": _nvidia_smi()}
    return {"05-outside": pd.DataFrame([row])}


def _nvidia_smi() -> int | None:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None


def graphs(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """The whole step as one CUDA graph, beside the same step launched kernel by kernel, and whether it still learns."""
    rows = []
    for batch in (1, 8):
        recipe = small(replace(BF16, batch=batch), tiny)
        for mode in ("eager", "graph"):
            training = _capturable(recipe)
            before = torch.cuda.memory_allocated()
            step = _captured(training) if mode == "graph" else lambda training=training: training.step(2)
            loss = torch.empty((), device="cuda")
            loss.copy_(step())
            first = loss.item()
            torch.cuda.reset_peak_memory_stats()
            wall = stopwatch.per_call(step, calls=2 if tiny else 10, rounds=2 if tiny else 5)
            held = stopwatch.on_host(step, 2 if tiny else 10)
            rows.append({**facts("bf16-sdpa", replace(BF16, batch=batch)), "mode": mode, **stopwatch.spread(wall),
                         **stopwatch.spread(held, "host"), "first_loss": first, "last_loss": step().item(),
                         "before_bytes": before, "allocated_bytes": torch.cuda.memory_allocated(),
                         "peak_bytes": torch.cuda.max_memory_allocated(),
                         "reserved_bytes": torch.cuda.memory_reserved()})
            del step, loss, training
            torch.cuda.empty_cache()
    return {"05-graphs": pd.DataFrame(rows)}


def _capturable(recipe: Recipe) -> Training:
    """A Training whose optimizer keeps its step count on the device, after three steps on a stream of their own."""
    with torch.device("cuda"):
        training = Training(recipe)
    for group in training.optimizer.param_groups:
        group["capturable"] = True
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(1, 4):
            training.step(number)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    return training


def _captured(training: Training):
    """A function that replays the training's step; it returns the loss, a tensor of the graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = training.step(4)

    def replay():
        graph.replay()
        return loss

    return replay
