"""Record on a real GPU what notebooks 01 to 08 look at. Needs no Jupyter.

`python -m gpt2.study.measure` runs each experiment in a fresh process, several at a time with --jobs (limits keep them
apart), and writes traces and tables under results/measured/<gpu>/; then it asks single kernels what they take, and
takes the times of notebooks 05 to 07, with nothing else running. What is finished is kept: a second run resumes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpt2.study import measured, paths
from gpt2.study.experiments import EXPERIMENTS, Experiment
from gpt2.study.results import provenance
from gpt2.study.runs import slug

PROBES = {  # program: its file under results/measured/<gpu>/, the evidence behind gpt2/memory's rules
    "kernels": "kernel-probes.json",
    "convolutions": "convolution-probes.csv.gz",
    "recurrent": "recurrent-probes.json.gz",
    "recurrent_sizes": "recurrent-sizes.csv.gz",
}
TAGS = ("sweep", "exact", "savings")  # what the notebooks show and the accuracy table needs


def child(name: str, folder: str, operators: bool) -> None:
    """One experiment in this process: a trace file."""
    from gpt2.study.experiments import record

    started = time.time()
    operators = operators and EXPERIMENTS[name].instrumented
    trace = record(EXPERIMENTS[name], operators=operators)
    trace.meta |= {"date": time.strftime("%Y-%m-%d"), "driver": _driver(), "operators": operators}
    trace.meta |= {key: facts[key] for key in ("commit", "dirty") if key in (facts := provenance("measured"))}
    trace.save(Path(folder) / f"{name}.json.gz")
    peak = max((m.max_allocated_bytes for m in trace.marks if m.step > 1), default=0)
    reserved = max((m.max_reserved_bytes for m in trace.marks), default=0)
    print(
        f"{name}: {len(trace)} events, peak allocated {peak:,}, reserved {reserved:,}, "
        f"mismatches {trace.meta.get('address_mismatches')}, labelled {trace.meta.get('operators_matched')}, "
        f"out of memory {trace.meta['out_of_memory'] is not None}, {time.time() - started:.1f} s",
        flush=True,
    )


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def spawn(experiment: Experiment, folder: Path, operators: bool = True) -> tuple[bool, str]:
    """Run `child` in a fresh process: whether it left a trace, and what it said last."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": experiment.alloc_conf}
    if not experiment.alloc_conf:
        environment.pop("PYTORCH_CUDA_ALLOC_CONF")
    command = [sys.executable, "-m", "gpt2.study.measure", "--child", experiment.name, "--out", str(folder)]
    command += [] if operators else ["--plain"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=paths.ROOT)
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return done.returncode == 0, done.stdout.strip() or f"{experiment.name}: failed: {last}"


def wanted(tags: str, names: str, folder: Path) -> list[Experiment]:
    """The experiments asked for that have no trace in `folder` yet. ValueError for a name or a tag nobody has."""
    chosen = [name for name in names.split(",") if name]
    if unknown := [name for name in chosen if name not in EXPERIMENTS]:
        raise ValueError(f"unknown experiment {', '.join(unknown)}; known: {', '.join(EXPERIMENTS)}")
    known = {tag for experiment in EXPERIMENTS.values() for tag in experiment.tags}
    asked = {tag for tag in tags.split(",") if tag} or (known if chosen else set(TAGS))
    if unknown := sorted(asked - known):
        raise ValueError(f"unknown tag {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    found = [e for e in EXPERIMENTS.values() if asked & set(e.tags) and (not chosen or e.name in chosen)]
    return [e for e in found if not (folder / f"{e.name}.json.gz").exists()]


def main(words: list[str] | None = None) -> int:
    """The command line. Exit status 0: all recorded; 1: some experiment crashed; 2: bad input, or no GPU here."""
    options = _options(words)
    if options.child:
        child(options.child, options.out, not options.plain)
        return 0
    try:
        folder = _folder(options)
        todo = [] if options.tables else wanted(options.tags, options.names, folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for done, line in pool.map(lambda e: spawn(e, folder, not options.plain), todo):
            failed += not done
            print(line, flush=True)
    written = measured.write(folder)
    print(
        f"{len(todo) - failed} of {len(todo)} runs recorded, {len(written)} tables in {paths.shorten(folder.parent)}"
    )
    if not (options.tables or options.tags or options.names):
        failed += not probe(folder.parent)
        failed += not take_times(folder.parent)
    return 1 if failed else 0


def probe(folder: Path) -> bool:
    """Single kernels, a file in `folder` each, where it is not there yet; whether all went well."""
    todo = [(program, folder / name) for program, name in PROBES.items() if not (folder / name).exists()]
    start = [sys.executable, "-m"]
    done = [subprocess.run([*start, f"gpt2.study.probes.{p}", str(file)], cwd=paths.ROOT) for p, file in todo]
    return not any(process.returncode for process in done)


def take_times(folder: Path) -> bool:
    """The timed experiments, their tables in `folder`; whether all went well."""
    rows = str(paths.ROOT / "build" / "savings-timing")
    programs = (["timing.run", str(folder)], ["savings.timing", rows, "--jobs", "1"], ["savings.recorded", rows])
    done = [subprocess.run([sys.executable, "-m", f"gpt2.study.{p}", *rest], cwd=paths.ROOT) for p, *rest in programs]
    return not any(process.returncode for process in done)


def _folder(options) -> Path:
    """Where traces go: as asked, or the folder of the GPU at hand. ValueError where there is none."""
    if options.tables and options.out:
        return Path(options.out)
    import torch

    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA GPU here to record on; `make reproduce` predicts one and needs none")
    return (
        Path(options.out)
        if options.out
        else paths.results_of("measured", slug(torch.cuda.get_device_name())) / "traces"
    )


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpt2.study.measure", description=__doc__)
    parser.add_argument("--out", default="", help="folder of the traces; default results/measured/<gpu>/traces")
    parser.add_argument("--tags", default="", help=f"groups of experiments, with commas; default {','.join(TAGS)}")
    parser.add_argument("--names", default="", help="these experiments only, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--plain", action="store_true", help="no operator labels")
    parser.add_argument(
        "--tables", action="store_true", help="record nothing, write the tables of the traces in --out"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
