"""How quick and how right: `python -m gpt2.study.bench`, or `make bench`. Needs no GPU.

In one run on one machine, the same GPT-2 step three ways: on the simulated card, through PyTorch's own memory tracker
on fake tensors, and on bare meta tensors, which is the least that a step without values takes. Rounds of the three are
interleaved and medians compared; the very first step of the process is shown besides, because the simulator remembers
what operators return. Seconds are of processor time, which another program on the machine hardly changes.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pandas as pd
import torch

from gpt2.memory import gpus
from gpt2.memory.allocator import CachingAllocator, Driver
from gpt2.memory.answer import answer
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.trace import Trace
from gpt2.model import GPT2, SIZES
from gpt2.step import Recipe, Training, unwatched
from gpt2.study import paths, results
from gpt2.study.experiments import EXPERIMENTS
from gpt2.study.fit import largest
from gpt2.study.words import parser

GPU, RELEASE = "H200", "2.11.0"  # of the recording
RECORDING = "measured/h200/traces/base.json.gz"
ROUNDS = 5
LAYERS = (12, 24, 48, 96)
SEVEN_BILLION = ("--gpu H200 --layers 32 --width 4096 --heads 32 --vocabulary 32000 --context 2048 --length 2048 "
                 "--batch 1 --precision bf16 --attention sdpa --json").split()

# --- one step, three ways: each gives the processor seconds of its steps and its peak, in bytes ----------------------


def ours(recipe: Recipe, steps: int = 3) -> tuple[list[float], int]:
    """On the simulated card."""
    with SimulatedGpu(GPU, torch=RELEASE) as card:
        training = Training(recipe, watch=card.watch)
        times = [_seconds(lambda: training.step(number)) for number in range(1, steps + 1)]  # noqa: B023
        trace = card.trace()
    return times, answer(trace, owners=False)["peak_allocated_bytes"]


def meta(recipe: Recipe, steps: int = 3) -> tuple[list[float], int]:
    """On bare meta tensors: no memory is counted."""
    training = Training(recipe, device="meta")
    return [_seconds(lambda: training.step(number)) for number in range(1, steps + 1)], 0  # noqa: B023


def mem_tracker(recipe: Recipe, steps: int = 3) -> tuple[list[float], int]:
    """Through torch.distributed._tools.MemTracker in fake mode, on its CPU device: a CPU-only build has no other."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        training = _in_place(recipe)
        tracker, times = MemTracker(), []
        tracker.track_external(training.model, training.optimizer)
        for number in range(1, steps + 1):
            with tracker:
                times.append(_seconds(lambda: training.step(number)))  # noqa: B023
            peak = max(sum(v for k, v in kinds.items() if "Total" in str(k))
                       for kinds in tracker.get_tracker_snapshot("peak").values())
            tracker.reset_mod_stats()
    return times, peak


def _in_place(recipe: Recipe) -> Training:
    """A Training whose model is made where it stays: a fake one cannot be moved."""
    training = Training.__new__(Training)
    training.recipe, training.device, training.watch = recipe, "cpu", unwatched
    training.model = GPT2(recipe.size, attention=recipe.attention)
    training.optimizer, training.scaler = training._optimizer(), torch.amp.GradScaler("cuda", enabled=False)
    training.tokens = training._tokens()
    return training


WAYS: dict[str, Callable] = {"simulated card": ours, "MemTracker, fake mode": mem_tracker, "bare meta tensors": meta}


def steps_table(recipe: Recipe, rounds: int = ROUNDS) -> pd.DataFrame:
    """way, first_step_s, step_s (median), ratio to bare meta tensors, peak_allocated_bytes and its error_bytes against
    the recording."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    first, peaks = {}, {}
    for i in range(rounds + 1):  # the first round warms up
        for way, run in WAYS.items():
            (begin, *seconds), peaks[way] = run(recipe)
            first.setdefault(way, begin)
            times[way] += seconds if i else []
            gc.collect()
        _say(f"round {i} of {rounds}")
    floor = statistics.median(times["bare meta tensors"])
    recorded = answer(Trace.load(paths.find(RECORDING)), owners=False)["peak_allocated_bytes"]
    rows = [{"way": way, "first_step_s": round(first[way], 2), "step_s": round(statistics.median(times[way]), 4),
             "ratio": round(statistics.median(times[way]) / floor, 2), "peak_allocated_bytes": peaks[way] or None,
             "error_bytes": peaks[way] - recorded if peaks[way] else None} for way in WAYS]
    rows.append({"way": "recorded on an H200", "peak_allocated_bytes": recorded, "error_bytes": 0})
    return pd.DataFrame(rows).astype({"peak_allocated_bytes": "Int64", "error_bytes": "Int64"})


# --- the rest --------------------------------------------------------------------------------------------------------


def events_per_second(times: int = 5) -> float:
    """The allocator alone: the allocations and frees of the recording, again and again, the best of several runs."""
    recorded = [e for e in Trace.load(paths.find(RECORDING)).events if e.action in ("alloc", "free")]
    return max(len(recorded) / _seconds(lambda: _feed(recorded)) for _ in range(times))


def _feed(events: list) -> None:
    allocator = CachingAllocator(Driver(2**40), torch=RELEASE)
    where: dict[int, int] = {}
    for event in events:
        if event.action == "alloc":
            where[event.address] = allocator.malloc(event.requested_bytes)
        else:
            allocator.free(where.pop(event.address))


def layer_rows() -> Iterator[dict]:
    """Seconds per step by the number of layers."""
    for layers in LAYERS:
        with _size(f"{layers} layers", replace(SIZES["124M"], layers=layers)) as name:
            times, _ = ours(Recipe(model=name))
        yield {"what": f"step of {layers} layers", "value": round(min(times[1:]), 3), "unit": "s"}
        _say(f"{layers} layers")


@contextmanager
def _size(name: str, size) -> Iterator[str]:
    SIZES[name] = size
    try:
        yield name
    finally:
        del SIZES[name]


def seven_billion_rows() -> Iterator[dict]:
    """A decoder of 7 billion parameters, three steps, in a process of its own."""
    command = [sys.executable, "-m", "gpt2", "predict", *SEVEN_BILLION]
    before = _children()
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=paths.ROOT, env=os.environ).stdout
    after = _children()
    seconds, memory = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, after.ru_maxrss * 1024
    peak = json.loads(out)["peak_allocated_bytes"]
    yield {"what": "7B decoder, whole prediction", "value": round(seconds, 1), "unit": "s"}
    yield {"what": "7B decoder, memory of this machine", "value": memory, "unit": "bytes"}
    yield {"what": "7B decoder, predicted peak allocated", "value": peak, "unit": "bytes"}


def _children():
    return resource.getrusage(resource.RUSAGE_CHILDREN)


def rest_table() -> pd.DataFrame:
    """what, value, unit."""
    base = EXPERIMENTS["base"]
    fit = min(_seconds(lambda: largest(base, gpus.find("A40"), "batch", "2.5.1")) for _ in range(3))
    rows = [{"what": "allocator alone", "value": round(events_per_second()), "unit": "events/s"},
            {"what": "fit, largest batch of an A40", "value": round(fit, 2), "unit": "s"}]
    return pd.DataFrame([*rows, *layer_rows(), *seven_billion_rows()], dtype=object)


def _seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> None:
    """Measure, print, save results/bench-step.csv and results/bench.csv."""
    parser("bench", __doc__).parse_args(words)
    recipe = EXPERIMENTS["base"].recipe
    where = results.provenance("measured", gpu="none: processor time of this machine", config={"cores": os.cpu_count()},
                               recording=RECORDING)
    for name, table in (("bench-step.csv", steps_table(recipe)), ("bench.csv", rest_table())):
        print(table.to_string(index=False), flush=True)
        results.save_table(table, name, where)


if __name__ == "__main__":
    main()
