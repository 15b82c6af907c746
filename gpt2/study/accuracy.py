"""How exact the predictions are: every recording beside its prediction, made now, without a GPU.

`python -m gpt2.study.accuracy` writes results/predicted/<gpu>/00-accuracy.csv, a row per recording: peaks, differences,
and the first event in which the two traces part.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

from gpt2.memory.diff import compare
from gpt2.memory.trace import Trace
from gpt2.study import paths, results, runs
from gpt2.study.experiments import EXPERIMENTS, predict
from gpt2.study.tables import Shown

NAME = "00-accuracy"


def row(recorded: Trace) -> dict:
    """One recording and its prediction. Peaks of a run that failed are those up to the failure."""
    name = recorded.meta["experiment"]
    ours = predict(EXPERIMENTS[name], runs.slug(recorded.meta["gpu"]), torch_release=runs.release(recorded))
    difference = compare(recorded, ours)
    found = {"experiment": name, "event_count": len(recorded), "events_identical": difference.index is None}
    for words, pick in (("allocated", _allocated), ("reserved", _reserved)):
        theirs, mine = pick(recorded), pick(ours)
        found |= {
            f"recorded_{words}_bytes": theirs,
            f"predicted_{words}_bytes": mine,
            f"{words}_off_bytes": mine - theirs,
        }
    failures = [trace.meta["out_of_memory"] for trace in (recorded, ours)]
    found["fits"] = failures[0] is None
    found["same_verdict"] = _failure(failures[0]) == _failure(failures[1])
    found["first_difference"] = "" if difference.index is None else _first(difference)
    return found


def _allocated(trace: Trace) -> int:
    """The allocator's own mark over the steps after the first; of a run that failed, by its events."""
    marks = [mark.max_allocated_bytes for mark in trace.marks if mark.step > 1]
    return max(trace.allocated_bytes()) if trace.meta["out_of_memory"] or not marks else max(marks)


def _reserved(trace: Trace) -> int:
    if trace.meta["out_of_memory"] or not trace.marks:
        return max(trace.reserved_bytes())
    return max(mark.max_reserved_bytes for mark in trace.marks)


def _failure(failure: dict | None) -> tuple | None:
    """Step, phase and bytes asked of a failure; the history of a real GPU has them rounded up to 512."""
    return failure and (failure["step"], failure["phase"], -(-failure["requested_bytes"] // 512))


def _first(difference) -> str:
    """Where two traces part: the event's number and what each has there."""
    sides = []
    for events in (difference.left_events, difference.right_events):
        if difference.index >= len(events):
            sides.append("nothing more")
        else:
            event = events[difference.index]
            sides.append(f"{event.action} {event.requested_bytes:,} B {event.operator}".strip())
    return f"event {difference.index:,}: recorded {sides[0]}, predicted {sides[1]}"


def table(folder: Path, say=lambda line: None) -> pd.DataFrame:
    """All recordings of a folder, by name; `say` hears a line for each."""
    rows = []
    for path in sorted(folder.glob("*.json.gz")):
        rows.append(row(Trace.load(path)))
        last = rows[-1]
        say(
            f"{last['experiment']:<28} allocated {last['allocated_off_bytes']:+,} B, reserved "
            f"{last['reserved_off_bytes']:+,} B, events {'identical' if last['events_identical'] else 'differ'}"
        )
    return pd.DataFrame(rows)


def save(rows: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """Write the table beside the other predictions for that card."""
    first = Trace.load(next(iter(sorted(folder.glob("*.json.gz")))))
    gpu, release = first.meta["gpu"], runs.release(first)
    facts = results.provenance(
        "predicted",
        gpu=runs.slug(gpu).upper(),
        torch=release,
        seed=0,
        config={"recordings": len(rows), "recorded_on": gpu, "driver": first.meta.get("driver")},
    )
    return results.save_table(rows, results.table_path("predicted", NAME, runs.slug(gpu)), facts)


def summary(rows: pd.DataFrame) -> str:
    """How many of how many are equal, in a line."""
    n = len(rows)
    return (
        f"{n} recordings: peak allocated equal to the byte in {(rows['allocated_off_bytes'] == 0).sum()}, "
        f"peak reserved in {(rows['reserved_off_bytes'] == 0).sum()}, verdict in {rows['same_verdict'].sum()}, "
        f"all events in {rows['events_identical'].sum()}"
    )


def by_kind(rows: pd.DataFrame) -> str:
    """The table of the README: how many recordings of each kind are equal, as Markdown."""
    lines = [
        "| recorded on an H200 | runs | peak allocated equal to the byte | peak reserved | verdict | every event |",
        "|---|---|---|---|---|---|",
    ]
    kinds = rows["experiment"].map(_kind)
    for kind in dict.fromkeys(_KINDS.values()):
        chosen = rows[kinds == kind]
        equal = [
            (chosen["allocated_off_bytes"] == 0),
            (chosen["reserved_off_bytes"] == 0),
            chosen["same_verdict"],
            chosen["events_identical"],
        ]
        lines.append(f"| {kind} | {len(chosen)} | " + " | ".join(str(int(column.sum())) for column in equal) + " |")
    return "\n".join(lines)


_KINDS = {
    "sweep": "batch sweep, 45,440 MiB, native and expandable",
    "exact": "other settings of our GPT-2",
    "variable": "other settings of our GPT-2",
    "savings": "ways of getting memory back, at their limits too",
    "other": "models that are not ours",
    "stranger": "ten models of a blind test, as predicted today",
    "newcomer": "32 models of a second blind test, as predicted today",
}


def _kind(experiment: str) -> str:
    known = EXPERIMENTS[experiment]
    tag = next((tag for tag in _KINDS if tag in known.tags), "exact" if known.recipe else "other")
    return _KINDS[tag]


def show(folder: str = runs.HOME) -> Shown:
    """The committed table's rows that are not equal in everything, for readers."""
    rows = results.load_table(f"predicted/{folder}/{NAME}.csv")
    off = rows[(rows["allocated_off_bytes"] != 0) | (rows["reserved_off_bytes"] != 0) | ~rows["events_identical"]]
    chosen = off[["experiment", "allocated_off_bytes", "reserved_off_bytes", "first_difference"]].fillna("")
    chosen.columns = ["experiment", "allocated, off (bytes)", "reserved, off (bytes)", "first difference"]
    return Shown(chosen.reset_index(drop=True), f"{summary(rows)}. Those that differ:")


def main(words: list[str] | None = None) -> int:
    """The command line; exit status 2 where there are no recordings."""
    parser = argparse.ArgumentParser(prog="python -m gpt2.study.accuracy", description=__doc__)
    parser.add_argument("--gpu", default=runs.HOME, help="folder of results/measured, default %(default)s")
    options = parser.parse_args(words)
    folder = paths.ROOT / "results" / "measured" / options.gpu / "traces"
    if not any(folder.glob("*.json.gz")):
        print(f"error: no recordings in {paths.shorten(folder)}; `make measure` makes them", file=sys.stderr)
        return 2
    rows = save(table(folder, lambda line: print(line, flush=True)), folder)
    print(summary(rows), by_kind(rows), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
