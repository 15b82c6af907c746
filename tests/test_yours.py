"""The reader's own module, script, snapshot and guesses, as notebook 10 takes them."""

import pytest
import torch
from torch import nn

from gpt2.memory.gpus import find
from gpt2.study import paths, yours
from gpt2.study.interactive import guesses
from gpt2.study.tables import MIB

HERE = {"gpu": "T4", "torch_release": "2.11.0"}
LOOP = str(paths.ROOT / "notebooks" / "scripts" / "your_loop.py")


def wide() -> yours.subjects.Subject:
    """A net whose hidden layer takes 40 MiB a sample."""
    return yours.subject(lambda: nn.Sequential(nn.Linear(1, 10 * MIB), nn.ReLU()),
                         lambda batch: (torch.randn(batch, 1),), lambda model, data: model(data[0]).sum())


def test_the_largest_batch_fits_and_the_next_does_not_both_tried():
    found = yours.largest(wide(), "T4", torch_release="2.11.0", first=4)
    tried = {trial.number: trial for trial in found.tried}
    assert tried[found.largest].fits and not tried[found.largest + 1].fits
    assert tried[found.largest].peak_reserved_bytes <= find("T4").free_bytes_at_start
    row = yours.fits(wide(), ("T4",), torch_release="2.11.0").frame.iloc[0]
    assert row["largest batch (sequences)"] == found.largest


def test_the_ledger_of_a_module_adds_up():
    table = yours.ledger(wide(), 2, **HERE).frame
    trace = yours.trained(wide(), 2, **HERE)
    peak = trace.allocated_bytes()[trace.peak([2])]
    assert round(table["at the peak (MiB)"].sum() * MIB) == peak
    assert table["of it (share)"].sum() == pytest.approx(1)


def test_a_del_in_the_example_script_is_the_edited_script_to_the_byte(tmp_path):
    found = yours.script(LOOP, **HERE)
    (release,) = [r for r in found.releases if r.names == ("out",)]
    assert release.held_bytes == 16 * 256 * 30_522 * 4 == release.saved_allocated_bytes
    text = open(LOOP).read()
    lines = text.splitlines(keepends=True)
    lines.insert(release.places[0][1] - 1, "    del out\n")
    (tmp_path / "edited.py").write_text("".join(lines))
    edited = yours.script(str(tmp_path / "edited.py"), **HERE)
    assert max(edited.trace.allocated_bytes()) == release.peak_allocated_bytes
    assert max(edited.trace.reserved_bytes()) == release.peak_reserved_bytes


def test_a_script_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match="no script nowhere.py"):
        yours.script("nowhere.py", **HERE)
    assert yours.place("scripts/your_loop.py") == LOOP


def test_a_snapshot_is_told_replayed_and_given_its_least_room():
    trace = yours.snapshot_trace(yours.place("../results/measured/h200/snapshots/hf-gpt2.pickle"))
    assert "100.0% of its bytes have an owner" in yours.snapshot_facts(trace).caption
    assert yours.what_if(trace, ("T4", "H200")).frame["fits"].all()
    least = yours.smallest_room(trace)
    assert least["default"] == 1_156 * MIB
    assert not yours.replay.replay(trace, capacity_bytes=least["default"] - 2 * MIB).fits
    assert yours.replay.replay(trace, capacity_bytes=least["default"]).fits


def test_guesses_are_scored_beside_the_authors(study_out, monkeypatch):
    monkeypatch.setattr(guesses, "_kept", {})
    guesses.keep("batch", 40)
    table = yours.scored().frame.set_index("question")
    row = table.loc["The largest batch that fits 45,440 MiB?"]
    assert row["verdict"] == "2.0 times too high" and row["the author's guess"] == "huge"
    assert table.loc["When does memory peak?", "verdict on it"] == "right"
