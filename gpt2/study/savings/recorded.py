"""What the GPU did with the savings, as tables: `python -m gpt2.study.savings.recorded [OUT of savings.timing]`.

From the recorded traces come 07-savings and 07-lengths, from the timing 07-steps and 07-loss, all with the provenance
of the recordings, under results/measured/h200/.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from gpt2.memory.trace import Trace
from gpt2.study import results, runs, tables
from gpt2.study.savings.ladder import LENGTH_STEP, LENGTHS, SAVINGS, Saving, by_key
from gpt2.study.savings.predict import at_largest, at_peak, config, failure


def saving_rows() -> Iterator[dict]:
    """One row for each saving whose step with 8 sequences was recorded; its pair where that was recorded too."""
    for saving in SAVINGS:
        trace = runs.recorded(saving.name)
        if trace is not None:
            row = {"key": saving.key, "saving": saving.says, "batch_count": saving.batch} | at_peak(trace)
            yield row | _pair(saving)


def _pair(saving: Saving) -> dict:
    fits, fails = (runs.recorded(saving.at(saving.largest + more)) for more in (0, 1))
    return {} if fits is None or fails is None else at_largest(saving.largest, fits) | failure(fails)


def length_rows() -> Iterator[dict]:
    """The longest sequence and one 256 tokens longer, where both were recorded."""
    for key, length in LENGTHS.items():
        fits, fails = (runs.recorded(f"save-{key}-length-{n}") for n in (length, length + LENGTH_STEP))
        if fits is not None and fails is not None:
            row = {"key": key, "saving": by_key(key).says, "batch_count": 1, "longest_count": length}
            yield row | {"longest_fits": fits.meta["out_of_memory"] is None} | at_peak(fits) | failure(fails)


def save(name: str, table: pd.DataFrame, facts: dict) -> None:
    """Write one table under results/measured/h200/ and say so."""
    results.save_table(table, results.table_path("measured", name, runs.HOME), facts)
    print(f"{name}: {len(table)} rows")


def timing(folder: Path) -> None:
    """Tables of what `savings.timing` left in a folder."""
    about = json.loads((folder / "about.json").read_text())
    facts = {
        "kind": "measured",
        "gpu": about["gpu"],
        "torch": about["torch"],
        "cuda": about["cuda"],
        "driver": about["driver"],
        "date": about["date"],
        "free_bytes": about["free_bytes"],
        "config": {"model": "124M", "length": 1024, "limit_mib": about["limit_mib"]},
        "seed": 0,
        "command": "python -m gpt2.study.savings.timing",
    }
    steps = pd.read_csv(folder / "steps.csv")
    steps["error"] = steps["error"].str.partition(" GPU ")[0]  # the rest tells of this machine's other processes
    save("07-steps", steps, facts)
    if (folder / "loss.csv").is_file():
        liger = {"liger_kernel": about["liger_kernel"]} if about.get("liger_kernel") else {}
        save("07-loss", pd.read_csv(folder / "loss.csv"), facts | liger | {"config": {"repetitions": 10}})


def _provenance(trace: Trace, name: str) -> dict:
    return tables.provenance(trace, **config(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("timing", nargs="?", help="the folder that savings.timing wrote")
    arguments = parser.parse_args()
    some = runs.recorded(by_key("bf16").name)
    for name, rows in (("07-savings", saving_rows()), ("07-lengths", length_rows())):
        table = pd.DataFrame(list(rows))
        if len(table):
            save(name, table, _provenance(some, name))
    if arguments.timing:
        timing(Path(arguments.timing))


if __name__ == "__main__":
    main()
