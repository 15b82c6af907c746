"""How the study times: on the device by its own events, on the host by its clock; medians of many repeats, with spread.

A simulated GPU has no time: on one, readings of the device are 0 and those of the host are this machine's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager

import torch


def spread(values: list[float], name: str = "time") -> dict:
    """Median, 10th and 90th percentile and number of readings, as columns `<name>_ms`, `<name>_p10_ms`, ..."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"{name}_ms": round(statistics.median(ordered), 5), f"{name}_p10_ms": round(ordered[round(0.1 * last)], 5),
            f"{name}_p90_ms": round(ordered[round(0.9 * last)], 5), "repeat_count": len(ordered)}


def on_device(function: Callable[[], object], repeats: int, warmup: int = 3) -> list[float]:
    """Milliseconds of each call between two device events, the device idle before each."""
    for _ in range(warmup):
        function()
    readings = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        readings.append(float(start.elapsed_time(end)))
    return readings


def on_host(function: Callable[[], object], repeats: int, warmup: int = 2,
            before: Callable[[], object] = lambda: None) -> list[float]:
    """Milliseconds that each call keeps Python, the device idle before each, except for what `before` enqueues."""
    readings = []
    for _ in range(warmup + repeats):
        torch.cuda.synchronize()
        before()
        start = time.perf_counter()
        function()
        readings.append(1000 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return readings[warmup:]


def per_call(function: Callable[[], object], calls: int, rounds: int, warmup: int = 2) -> list[float]:
    """Wall-clock milliseconds of a call in a run of `calls` without waiting in between; one reading per round."""
    for _ in range(warmup):
        function()
    readings = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
        readings.append(1000 * (time.perf_counter() - start) / calls)
    return readings


class LineClock:
    """A `watch` that notes when each line of a step returned on the host, and an event for when the device got there.

    With `synchronise`, each line is waited for.
    """

    def __init__(self, *, synchronise: bool = False):
        self.synchronise = synchronise
        self.lines: list[tuple[int, str, float, object]] = []
        self._began: dict[int, tuple[float, object]] = {}

    def begin(self, step: int) -> None:
        """The step starts now."""
        self._began[step] = (time.perf_counter(), self._event())

    @contextmanager
    def watch(self, phase: str, step: int):
        yield
        if self.synchronise:
            torch.cuda.synchronize()
        self.lines.append((step, phase, time.perf_counter(), self._event()))

    def readings(self) -> list[dict]:
        """For each line: step, phase, host_ms and device_ms since the step began (call after a synchronisation)."""
        rows = []
        for step, phase, moment, event in self.lines:
            if step in self._began:
                began, first = self._began[step]
                rows.append({"step": step, "phase": phase, "host_ms": 1000 * (moment - began),
                             "device_ms": float(first.elapsed_time(event))})
        return rows

    @staticmethod
    def _event():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
