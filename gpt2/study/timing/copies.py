"""Timing the way of a batch to the device: who waits for a copy, what it overlaps with, and a loader that is late."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

import pandas as pd
import torch

from gpt2.study import timeline
from gpt2.study.timing import stopwatch
from gpt2.study.timing.stream import BF16, Loop, compact, facts, profiled, small

SIZES = {"token ids 32 x 1,024": ((32, 1024), torch.int64), "4 MiB": ((1024, 1024), torch.float32),
         "images 256 x 3 x 224 x 224": ((256, 3, 224, 224), torch.float32)}


def copies(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """Pinned or pageable, blocking or not: how long the copy takes, and how long the call keeps Python, with the device
    idle and with it busy."""
    rows, busy, busy_ms = [], *_busy(tiny)
    for what, (shape, dtype) in SIZES.items():
        shape = (2, 8) if tiny else shape
        pageable = torch.randint(0, 50_000, shape) if dtype == torch.int64 else torch.randn(shape)
        for memory, source in (("pageable", pageable), ("pinned", pageable.pin_memory())):
            for call, later in (("blocking", False), ("non_blocking", True)):
                def copy(source=source, later=later):
                    return source.to("cuda", non_blocking=later)

                repeats = 3 if tiny else 20
                rows.append({
                    "what": what, "memory": memory, "call": call, "size_bytes": source.numel() * source.element_size(),
                    **stopwatch.spread(stopwatch.on_device(copy, repeats), "copy"),
                    **stopwatch.spread(stopwatch.on_host(copy, repeats), "host"),
                    **stopwatch.spread(stopwatch.on_host(copy, repeats, before=busy), "busy_host"), "busy_ms": busy_ms})
    return {"05-copies": pd.DataFrame(rows)}


def _busy(tiny: bool) -> tuple[Callable[[], None], float]:
    """Work for about 10 ms on the device that takes the host no time to enqueue, and how long it is."""
    n = 32 if tiny else 8192
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)

    def work():
        for _ in range(7):
            a @ a

    return work, stopwatch.spread(stopwatch.on_device(work, 3))["time_ms"]


def overlap(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """Images of the next step beside the computation of this one: apart, on one stream, on two."""
    work, _ = _busy(tiny)
    pageable = torch.randn(2, 8) if tiny else torch.randn(SIZES["images 256 x 3 x 224 x 224"][0])
    pinned, second = pageable.pin_memory(), torch.cuda.Stream()

    def aside(source):
        second.wait_stream(torch.cuda.current_stream())
        work()
        with torch.cuda.stream(second):
            source.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(second)

    ways = {
        "computation alone": work,
        "copy alone, pinned": lambda: pinned.to("cuda", non_blocking=True),
        "copy alone, pageable": lambda: pageable.to("cuda", non_blocking=True),
        "one stream, pinned": lambda: (work(), pinned.to("cuda", non_blocking=True)),
        "two streams, pinned": lambda: aside(pinned),
        "two streams, pageable": lambda: aside(pageable),
    }
    times = {way: stopwatch.on_device(function, 3 if tiny else 12) for way, function in ways.items()}
    return {"05-overlap": pd.DataFrame([{"way": way, **stopwatch.spread(readings)} for way, readings in times.items()])}


def loader(tiny: bool = False) -> dict[str, pd.DataFrame]:
    """A loader that takes its time: in the loop's own thread, without and with a wait for the device in each step, and
    in a thread of its own that works ahead."""
    recipe, rows = small(BF16, tiny), []
    loop = Loop(recipe)
    loop.steps(3)
    for delay_ms in (0, 20) if tiny else (0, 5, 10, 20, 40):
        for way, waits in (("host ahead", False), ("host waits each step", True)):
            step = partial(_late, loop, delay_ms, waits)
            times = stopwatch.per_call(step, 2 if tiny else 8, 2 if tiny else 3, warmup=1)
            rows.append({**facts("bf16-sdpa", recipe), "way": way, "delay_ms": delay_ms, **stopwatch.spread(times)})
        rows.append({**facts("bf16-sdpa", recipe), "way": "loader in a thread", "delay_ms": delay_ms,
                     **stopwatch.spread(_prefetched(loop, delay_ms, 2 if tiny else 24))})
    tables = {"05-loader": pd.DataFrame(rows)}
    for name, delay_ms in (("late", 20), ("prompt", 0)):
        tables[f"05-timeline-loader-{name}"] = timeline.stretches(
            compact(profiled(loop, 3, before=partial(_wait, delay_ms))), gap_ns=20_000)
    return tables


def _wait(delay_ms: float) -> None:
    """A loop that reads its loss, and then waits for data."""
    torch.cuda.synchronize()
    time.sleep(delay_ms / 1000)


def _late(loop: Loop, delay_ms: float, waits: bool) -> None:
    time.sleep(delay_ms / 1000)
    loss = loop.step()
    if waits:
        loss.item()


def _prefetched(loop: Loop, delay_ms: float, steps: int) -> list[float]:
    """Milliseconds a step, batches coming from a thread that keeps two ready; the host waits in each step."""
    ready: queue.Queue = queue.Queue(maxsize=2)

    def load():
        for _ in range(steps + 2):
            time.sleep(delay_ms / 1000)
            ready.put(loop.host)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    moments = []
    for _ in range(steps + 2):
        loop.host = ready.get()
        loop.step().item()
        moments.append(time.perf_counter())
    thread.join()
    return [1000 * (b - a) for a, b in zip(moments[2:], moments[3:], strict=False)] or [0.0]
