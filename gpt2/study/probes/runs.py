"""Operators on a real GPU one by one: what each allocates and frees, and which kernels it runs with which grids."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROWS_OF_A_PROFILE = 40
MARK = "spin_kernel"  # of torch.cuda._sleep: stands before and after each run in a profile
KERNELS = ("kernel", "gpu_memset", "gpu_memcpy")


def provenance() -> dict:
    """The card and the software at hand."""
    return {
        "kind": "measured",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def history(function: Callable) -> list[int]:
    """Bytes that a call allocates (positive) and frees (negative), in order."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=100_000, context=None)
    try:
        function()
    finally:
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
    sign = {"alloc": 1, "free_requested": -1}
    return [sign[event["action"]] * event["size"] for event in events if event["action"] in sign]


def kernels(events: list[dict]) -> list[list]:
    """[name, grid, block] of the kernels between the marks of a profile, mark by mark."""
    found = sorted((event for event in events if event.get("cat") in KERNELS), key=lambda event: event["ts"])
    parts: list[list] = []
    for event in found:
        if MARK in event["name"]:
            parts.append([])
        elif parts:
            parts[-1].append([event["name"], event["args"].get("grid"), event["args"].get("block")])
    return parts


def run(rows: list[dict], make: Callable[[dict], Iterator], until: float, *, warm: bool) -> list[dict]:
    """Each row with the history and the kernels of the named calls that `make` yields for it.

    None is begun after `until` (seconds since 1970). With `warm`, each call has run once before it is recorded: a
    library's handles and plans are there. What a card cannot do is a row with an error.
    """
    done: list[dict] = []
    for start in range(0, len(rows), ROWS_OF_A_PROFILE):
        if time.time() > until:
            break
        part = [dict(row) for row in rows[start : start + ROWS_OF_A_PROFILE]]
        order: list = []
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for row in part:
                try:
                    for name, function in make(row):
                        if warm:
                            function()
                        torch.cuda.synchronize()
                        torch.cuda._sleep(1)
                        order.append((row, name))
                        row[name] = history(function)
                        torch.cuda._sleep(1)
                        order.append(None)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            torch.cuda.synchronize()
        _add(order, profiler)
        done += part
        torch.cuda.empty_cache()
    return done


def _add(order: list, profiler) -> None:
    """The kernels of each call to its row, if the profile holds all marks."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        parts = kernels(json.loads(Path(file.name).read_text(encoding="utf-8"))["traceEvents"])
    if len(parts) == len(order):
        for what, names in zip(order, parts, strict=True):
            if what is not None:
                row, name = what
                row[f"{name} kernels"] = names
