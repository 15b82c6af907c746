"""How long a step takes with each saving, on a real GPU: `python -m gpt2.study.savings.timing OUT`. Needs no Jupyter.

Every configuration runs in a process of its own under the limit of 45,440 MiB, at batch 8 and at its largest batch,
and with the loss alone. Where liger-kernel is installed its loss is timed beside ours. Processes prepare side by side
and take turns on the GPU. Times are of CUDA events, medians over steps after the warm-up. A configuration that fails
is a row too. OUT receives steps.csv, loss.csv and about.json.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import pandas as pd
import torch
from torch.nn import functional as F

from gpt2.memory.fit import STEPS
from gpt2.savings import chunked_cross_entropy, liger_cross_entropy
from gpt2.step import Training
from gpt2.study.backends import attention_backend
from gpt2.study.experiments import EXPERIMENTS, Experiment
from gpt2.study.savings.ladder import LIMIT_MIB, SAVINGS

MiB = 2**20
PHASES = ("forward", "backward", "optimizer")
CHUNKS = (1, 2, 4, 8, 16, 32, 64)
LOSS = "loss alone"
LIGER = {"save-liger": "chunked", "save-ladder-5-liger": "save-ladder-5"}  # in place of the loss in 8 chunks


@dataclass(frozen=True)
class Patience:
    """How many steps are run and not timed, how many are timed, and after how long no more are begun."""

    warmup: int
    timed: int
    seconds: float


AT_8, AT_LARGEST, ONE_MORE = Patience(3, 10, 3.0), Patience(2, 4, 4.0), Patience(STEPS, 0, 0.0)


def configurations() -> dict[str, Patience]:
    """The experiments that run, and how long: each saving at batch 8, at its largest batch, and at one more."""
    liger = LIGER if find_spec("liger_kernel") else ()
    return ({s.name: AT_8 for s in SAVINGS} | {s.at(s.largest): AT_LARGEST for s in SAVINGS}
            | {s.at(s.largest + 1): ONE_MORE for s in SAVINGS} | dict.fromkeys(liger, AT_8))


def experiment(name: str) -> Experiment:
    """The experiment of that name, or one with liger-kernel's loss."""
    ours = EXPERIMENTS[LIGER.get(name, name)]
    return replace(ours, name=name, recipe=replace(ours.recipe, loss="liger")) if name in LIGER else ours


class Stopwatch:
    """A `Watch` that puts a CUDA event at the begin and the end of every line of a step."""

    def __init__(self):
        self.spans: list[tuple[int, str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, phase: str, step: int) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.spans.append((step, phase, begin, end))
        begin.record()
        yield
        end.record()

    def milliseconds(self, step: int) -> dict[str, float]:
        """Of each phase of one step, and of the whole from the first line's begin to the last one's end."""
        spans = [span for span in self.spans if span[0] == step]
        times = {phase: sum(b.elapsed_time(e) for _, p, b, e in spans if p == phase) for phase in PHASES}
        return {"step": spans[0][2].elapsed_time(spans[-1][3]), **times}


def time_steps(experiment: Experiment, patience: Patience, turn: Callable) -> dict:
    """One row: medians of the steps, and what the allocator counted. Steps begin when it is this process's `turn`."""
    torch.backends.cuda.matmul.allow_tf32 = False
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(LIMIT_MIB * MiB / total)
    watch, recipe = Stopwatch(), experiment.recipe
    row = {"experiment": experiment.name, "batch_count": recipe.batch, "length_count": recipe.length,
           "tokens_count": recipe.tokens * recipe.accumulate}
    try:
        training = Training(recipe, watch=watch)
        with turn(), attention_backend(experiment.backend):
            _steps(training, patience)
        row |= {"fits": True} | _medians(watch, patience.warmup)
    except torch.OutOfMemoryError as error:
        step = watch.spans[-1][0] if watch.spans else 0
        row |= {"fits": False, "failed_step": step, "error": str(error).splitlines()[0]}
    except RuntimeError as error:
        row |= {"error": str(error).splitlines()[0]}
    return row | {"peak_allocated_bytes": torch.cuda.max_memory_allocated(),
                  "peak_reserved_bytes": torch.cuda.max_memory_reserved()}


def _steps(training: Training, patience: Patience) -> None:
    for step in range(1, patience.warmup + 1):
        training.step(step)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for step in range(patience.warmup + 1, patience.warmup + patience.timed + 1):
        training.step(step)
        if step == patience.warmup + 1:
            torch.cuda.synchronize()  # the host runs ahead: only after a whole step it knows how long one takes
            most = patience.seconds / max(time.perf_counter() - started, 1e-3)
        if step - patience.warmup >= most:
            break
    torch.cuda.synchronize()


def _medians(watch: Stopwatch, warmup: int) -> dict:
    times = [watch.milliseconds(step) for step in sorted({span[0] for span in watch.spans}) if step > warmup]
    if not times:
        return {}
    row = {f"{name}_ms": round(median(t[name] for t in times), 3) for name in ("step", *PHASES)}
    spread = [t["step"] for t in times]
    return row | {"least_ms": round(min(spread), 3), "most_ms": round(max(spread), 3), "timed_count": len(times)}


def time_loss(turn: Callable) -> list[dict]:
    """Forward and backward of the loss alone, from hidden states: plain, in chunks and, where it is installed, Liger's.

    Sizes are those of GPT-2 at 8 x 1,024 tokens, and the small ones of N = 1,024, V = 5,000, C = 64.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    with turn():
        for N, V, D in ((8192, 50_257, 768), (1024, 5000, 64)):
            for precision in ("fp32", "bf16"):
                for name, loss in _losses():
                    rows.append({"loss": name, "precision": precision, "rows_count": N, "vocabulary_count": V,
                                 "width_count": D, **_loss_row(loss, N, V, D, precision)})
    return rows


def _losses() -> Iterator[tuple[str, Callable]]:
    yield "plain", lambda hidden, weight, targets: F.cross_entropy(hidden @ weight.t(), targets)
    for k in CHUNKS:
        yield f"{k} chunks", lambda hidden, weight, targets, k=k: chunked_cross_entropy(hidden, weight, targets, k)
    if find_spec("liger_kernel"):
        yield "liger", liger_cross_entropy


def _loss_row(loss: Callable, N: int, V: int, D: int, precision: str) -> dict:
    """Median of ten runs, and the peak of one over what was there before it."""
    torch.manual_seed(0)
    hidden = torch.randn(N, D, device="cuda", requires_grad=True)
    weight = (0.02 * torch.randn(V, D, device="cuda")).requires_grad_()
    targets = torch.randint(0, V, (N,), device="cuda")
    times, peak = [], 0
    try:
        for _ in range(13):
            hidden.grad = weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                value = loss(hidden, weight, targets)
            value.backward()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
            peak = torch.cuda.max_memory_allocated() - before
            del value
    except Exception as error:  # a library's kernel may fail in its own way: that is a row
        return {"error": (str(error).splitlines() or [type(error).__name__])[0]}
    return {"loss_ms": round(median(times[3:]), 3), "peak_bytes": peak}


# --- processes ------------------------------------------------------------------------------------------------------


def child(name: str, folder: Path) -> None:
    """One configuration in this process: OUT/rows/<name>.json."""

    @contextmanager
    def turn():
        with open(folder / "turn", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    torch.cuda.init()
    if name == LOSS:
        found = time_loss(turn)
    else:
        found = time_steps(experiment(name), configurations()[name], turn)
    (folder / "rows" / f"{name}.json").write_text(json.dumps(found))
    print(f"{name}: {found if isinstance(found, dict) else len(found)}", flush=True)


def spawn(name: str, folder: Path) -> str:
    """Run `child` in a fresh process; a crash becomes a row."""
    conf = "" if name == LOSS else EXPERIMENTS[LIGER.get(name, name)].alloc_conf
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf, "OMP_NUM_THREADS": "2"}
    if not conf:
        environment.pop("PYTORCH_CUDA_ALLOC_CONF")
    command = [sys.executable, "-m", "gpt2.study.savings.timing", str(folder), "--child", name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        (folder / "rows" / f"{name}.json").write_text(json.dumps({"experiment": name, "error": last}))
        return f"{name}: failed: {last}"
    return done.stdout.strip()


def collect(folder: Path, earlier: Sequence[Path] = ()) -> None:
    """steps.csv and loss.csv from what the processes left, here and in earlier folders. Needs no GPU.

    Of several runs of a configuration the one with the shortest step counts, because a busy host only adds to it; of
    runs that were not timed the last.
    """
    rows: dict = {}
    for path in (path for each in (*earlier, folder) for path in sorted((each / "rows").glob("*.json"))):
        found, before = json.loads(path.read_text()), rows.get(path.stem)
        timed = path.stem != LOSS and before is not None and "least_ms" in before and "least_ms" in found
        rows[path.stem] = min(found, before, key=lambda row: row["least_ms"]) if timed else found
    order = dict.fromkeys([*configurations(), *rows])
    steps = [rows[name] for name in order if name in rows and name != LOSS]
    pd.DataFrame(steps).to_csv(folder / "steps.csv", index=False)
    if isinstance(rows.get(LOSS), list):
        pd.DataFrame(rows[LOSS]).to_csv(folder / "loss.csv", index=False)


def about() -> dict:
    """The GPU at hand."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True)
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "driver": driver.stdout.strip() or None, "date": time.strftime("%Y-%m-%d"), "limit_mib": LIMIT_MIB,
            "free_bytes": torch.cuda.mem_get_info()[0],
            "liger_kernel": version("liger-kernel") if find_spec("liger_kernel") else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--child", default="")
    parser.add_argument("--names", default="", help="only these experiments, separated by commas")
    parser.add_argument("--earlier", nargs="*", default=[], type=Path, help="folders of earlier runs, to be added")
    parser.add_argument("--jobs", type=int, default=5, help="processes that prepare at a time; one of them has the GPU")
    arguments = parser.parse_args()
    folder = Path(arguments.out)
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    if arguments.child:
        child(arguments.child, folder)
        return
    (folder / "about.json").write_text(json.dumps(about(), indent=1))
    names = arguments.names.split(",") if arguments.names else [LOSS, *configurations()]
    wanted = [name for name in names if not (folder / "rows" / f"{name}.json").exists()]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for line in pool.map(lambda name: spawn(name, folder), wanted):
            print(line, flush=True)
    collect(folder, arguments.earlier)


if __name__ == "__main__":
    main()
