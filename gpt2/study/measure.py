"""Everything that needs a real GPU. Needs no Jupyter.

`python -m gpt2.study.measure` runs each experiment in a fresh process, several at a time (limits keep them apart), and
writes traces and tables under results/measured/<gpu>/. What is finished is kept: a second run resumes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpt2.study.experiments import EXPERIMENTS, Experiment


def child(name: str, folder: str, operators: bool) -> None:
    """One experiment in this process: a trace file."""
    from gpt2.study.experiments import record

    started = time.time()
    trace = record(EXPERIMENTS[name], operators=operators)
    trace.meta |= {"date": time.strftime("%Y-%m-%d"), "driver": _driver(), "operators": operators}
    trace.save(Path(folder) / f"{name}.json.gz")
    peak = max((m.max_allocated_bytes for m in trace.marks if m.step > 1), default=0)
    reserved = max((m.max_reserved_bytes for m in trace.marks), default=0)
    print(f"{name}: {len(trace)} events, peak allocated {peak:,}, reserved {reserved:,}, "
          f"mismatches {trace.meta.get('address_mismatches')}, labelled {trace.meta.get('operators_matched')}, "
          f"out of memory {trace.meta['out_of_memory'] is not None}, {time.time() - started:.1f} s", flush=True)


def _driver() -> str:
    try:
        return subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                              text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def spawn(experiment: Experiment, folder: Path, operators: bool = True) -> str:
    """Run `child` in a fresh process; a crash is its last line of output."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": experiment.alloc_conf}
    if not experiment.alloc_conf:
        environment.pop("PYTORCH_CUDA_ALLOC_CONF")
    command = [sys.executable, "-m", "gpt2.study.measure", "--child", experiment.name, "--out", str(folder)]
    done = subprocess.run(command + ([] if operators else ["--plain"]), capture_output=True, text=True, env=environment)
    return done.stdout.strip() or f"{experiment.name}: failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child")
    parser.add_argument("--out", default="")
    parser.add_argument("--plain", action="store_true", help="no operator labels")
    parser.add_argument("--tags", default="")
    parser.add_argument("--names", default="")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.out, not arguments.plain)
        return
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    tags, names = set(arguments.tags.split(",")) - {""}, set(arguments.names.split(",")) - {""}
    wanted = [e for e in EXPERIMENTS.values() if (not tags or tags & set(e.tags)) and (not names or e.name in names)]
    wanted = [e for e in wanted if not (folder / f"{e.name}.json.gz").exists()]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for line in pool.map(lambda e: spawn(e, folder, not arguments.plain), wanted):
            print(line, flush=True)


if __name__ == "__main__":
    main()
