"""Times a real GPU, no Jupyter needed: `python -m gpt2.study.timing.run FOLDER [--only NAME,NAME] [--tiny]`.

Each experiment is independent; it writes small tables into FOLDER, with provenance, and one that fails is a row of
`05-runs.csv` with its error. `--tiny` runs every line of it in miniature.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

from gpt2.study import results, syncs
from gpt2.study.timing import copies, optimizer, stream, sync_costs

Tables = dict[str, pd.DataFrame]
EXPERIMENTS: dict[str, Callable[[bool], Tables]] = {
    "ceilings": stream.ceilings,
    "kernels": stream.kernels,
    "host": stream.host,
    "phases": stream.phases,
    "sync counts": sync_costs.counts,
    "sync costs": sync_costs.costs,
    "copies": copies.copies,
    "overlap": copies.overlap,
    "loader": copies.loader,
    "adamw": optimizer.adamw,
    "clip": optimizer.clip,
    "zero_grad": optimizer.zero_grad,
    "accumulation": optimizer.accumulation,
    "outside": stream.outside,
    "graphs": stream.graphs,  # last: a capture that fails may leave the device unusable
}


def run(name: str, folder: Path, about: dict, tiny: bool) -> dict:
    """One experiment; returns its row of `05-runs.csv`."""
    started, error, written = time.perf_counter(), "", 0
    try:
        for table_name, table in EXPERIMENTS[name](tiny).items():
            results.save_table(table, folder.absolute() / f"{table_name}.csv", about)
            written += len(table)
    except Exception as failure:  # whatever it is, the others still get their turn
        error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        traceback.print_exc(limit=-4)
    gc.collect()
    if torch.cuda.is_available() and not error.startswith("AcceleratorError"):
        torch.cuda.empty_cache()
    row = {"experiment": name, "row_count": written, "seconds": round(time.perf_counter() - started, 1), "error": error}
    print(f"{name:<14} {row['seconds']:6.1f} s  {written:6} rows  {error}", flush=True)
    return row


def main(words: list[str] | None = None) -> int:
    """The command line; 0 if every experiment ran, else 1."""
    parser = argparse.ArgumentParser(prog="python -m gpt2.study.timing.run", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help=f"some of: {', '.join(EXPERIMENTS)}")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(words)
    if not torch.cuda.is_available() or syncs.is_simulated():
        print("error: there is no GPU here, and a simulated one has no time", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    names = options.only.split(",") if options.only else list(EXPERIMENTS)
    torch.backends.cuda.matmul.allow_tf32 = False
    about = results.provenance("measured", gpu=torch.cuda.get_device_name(), seed=0,
                               command="python -m gpt2.study.timing.run", timing="medians after warm-up")
    rows = [run(name, options.folder, about, options.tiny) for name in names]
    results.save_table(pd.DataFrame(rows), options.folder.absolute() / "05-runs.csv", about)
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
