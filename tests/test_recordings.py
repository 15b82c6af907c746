"""Recordings of a real GPU beside their predictions: the same events, the same bytes."""

import pytest

from gpt2.memory.trace import Trace
from gpt2.study import accuracy, results
from gpt2.study.experiments import EXPERIMENTS
from gpt2.study.paths import ROOT

FOLDER = ROOT / "results" / "measured" / "h200" / "traces"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))
TAGS = {"sweep", "exact", "variable", "other", "stranger", "newcomer"}
SPREAD = ("base", "batch-1", "length-512", "sweep-20", "sweep-21", "sweep-22-expandable", "bf16", "bf16-sdpa-dropout",
          "checkpoint", "accumulate", "loop", "350M-bf16-sdpa")


@pytest.mark.parametrize("name", SPREAD)
def test_a_prediction_is_the_recording(name):
    found = accuracy.row(Trace.load(FOLDER / f"{name}.json.gz"))
    assert found["events_identical"], found["first_difference"]
    assert (found["allocated_off_bytes"], found["reserved_off_bytes"], found["same_verdict"]) == (0, 0, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if n not in SPREAD and TAGS & set(EXPERIMENTS[n].tags)])
def test_no_prediction_is_worse_than_the_table_says(name):
    kept = results.load_table(ROOT / "results/predicted/h200/00-accuracy.csv").set_index("experiment")
    if name not in kept.index:
        pytest.skip("recorded after the table was made; `make accuracy` adds it")
    found, said = accuracy.row(Trace.load(FOLDER / f"{name}.json.gz")), kept.loc[name]
    assert found["same_verdict"] or not said["same_verdict"]
    assert found["events_identical"] or not said["events_identical"], found["first_difference"]
    for column in ("allocated_off_bytes", "reserved_off_bytes"):
        assert abs(found[column]) <= abs(said[column]), column


def test_every_recording_is_of_a_known_experiment_and_replays():
    assert set(NAMES) <= set(EXPERIMENTS) and len(NAMES) >= 77
    for name in NAMES[::6]:
        meta = Trace.load(FOLDER / f"{name}.json.gz").meta
        assert meta["kind"] == "measured" and meta["experiment"] == name
        assert meta["address_mismatches"] in (0, None)
        assert meta["date"] and meta["driver"] and meta["cuda"]


def test_the_accuracy_table_has_every_baseline_exact():
    rows = results.load_table(ROOT / "results/predicted/h200/00-accuracy.csv").set_index("experiment")
    exact = [name for name in rows.index if name.startswith(("sweep-", "length-")) or name in ("base", "batch-1")]
    assert len(exact) == 24
    chosen = rows.loc[exact]
    assert chosen["events_identical"].all() and chosen["same_verdict"].all()
    assert (chosen[["allocated_off_bytes", "reserved_off_bytes"]] == 0).all(axis=None)


def test_the_second_blind_test_stands_as_it_came_out():
    rows = results.load_table(ROOT / "results/predicted/h200/00-second-blind-test.csv")
    allocated = rows["allocated_off_bytes"].abs() / rows["recorded_allocated_bytes"]
    reserved = rows["reserved_off_bytes"].abs() / rows["recorded_reserved_bytes"]
    equal = [int((rows[f"{what}_off_bytes"] == 0).sum()) for what in ("allocated", "reserved")]
    near = int(((allocated <= 0.01) & (reserved <= 0.02)).sum())
    where = "[as they came out](results/predicted/h200/00-second-blind-test.csv)"
    said = (f"{len(rows)} runs ({where}): {equal[0]} equal in peak allocated, {equal[1]} in\nreserved; "
            f"{near} within 1 % of allocated and 2 % of reserved.")
    assert said in (ROOT / "README.md").read_text()


def test_the_readme_says_what_the_table_says():
    rows = results.load_table(ROOT / "results/predicted/h200/00-accuracy.csv")
    assert accuracy.by_kind(rows) in (ROOT / "README.md").read_text(), "put in what `make accuracy` prints"
