"""Tables and figures as files: what they say of themselves, and that they are whole or not there."""

import errno
import hashlib
import os
import random
import resource
import signal
import subprocess
import sys

import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from gpt2.study import paths, results

ALT = "The peak, 17,054 MiB, is in the loss's backward − not in the optimizer (batch < 16 & fp32)."
TABLE = pd.DataFrame(
    {
        "batch_count": [20, 21],
        "peak_bytes": [42_336_256_000, None],
        "step_ms": [0.1, 1 / 3],
        "note": ["fits, # just", 'asked for "4,122.6 MiB"\nin step 2'],
    }
)


@pytest.fixture
def facts():
    return results.provenance("predicted", gpu="A40", config={"batch": [20, 21], "precision": "fp32"}, seed=0)


def in_a_new_process(code: str, **variables) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | variables, cwd=paths.ROOT, capture_output=True, text=True)


def test_a_table_comes_back_as_it_was_saved(study_out, facts):
    path = results.table_path("predicted", "04-sweep", "A40")
    shown = results.save_table(TABLE, path, facts)
    assert path == study_out / "results/predicted/A40/04-sweep.csv"
    read = results.load_table("predicted/A40/04-sweep.csv")
    pd.testing.assert_frame_equal(read, TABLE, check_dtype=False)
    assert read.attrs == shown.attrs == facts


def test_floats_come_back_to_the_last_bit(study_out, facts):
    table = pd.DataFrame({"step_ms": [random.Random(i).lognormvariate(0, 20) for i in range(1000)]})
    results.save_table(table, "predicted/01-x.csv", facts)
    assert results.load_table("predicted/01-x.csv").step_ms.tolist() == table.step_ms.tolist()


def test_the_file_has_a_json_header_integers_and_no_index(study_out, facts):
    path = results.table_path("predicted", "04-sweep", "A40")
    results.save_table(TABLE, path, facts)
    data = path.read_bytes()
    assert data.startswith(b'# kind: "predicted"\n# gpu: "A40"\n') and b"\r" not in data
    assert b'# config: {"batch": [20, 21], "precision": "fp32"}\n' in data
    assert b"\nbatch_count,peak_bytes,step_ms,note\n20,42336256000,0.1," in data
    assert b'\n21,,0.3333333333333333,"asked for' in data


def test_a_run_that_finds_the_same_leaves_the_file_alone(study_out, facts):
    path = results.table_path("predicted", "04-sweep", "A40")
    results.save_table(TABLE, path, facts)
    before = path.stat()
    later = facts | {"date": "2099-01-01T00:00:00Z", "commit": "f" * 40, "dirty": True, "command": "other"}
    assert results.save_table(TABLE, path, later).attrs == facts
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


@pytest.mark.parametrize("change", [{"config": {"batch": [20]}}, {"gpu": "A40 "}, {"torch": "2.5.1"}, {"seed": 1}])
def test_another_configuration_is_another_table(study_out, facts, change):
    path = results.table_path("predicted", "04-sweep", "A40")
    results.save_table(TABLE, path, facts)
    results.save_table(TABLE, path, facts | change)
    assert results.load_table(path).attrs == facts | change


def test_another_number_is_another_table(study_out, facts):
    path = results.table_path("predicted", "04-sweep", "A40")
    results.save_table(TABLE, path, facts)
    results.save_table(TABLE.assign(step_ms=[0.1, 0.2]), path, facts | {"date": "2099-01-01T00:00:00Z"})
    read = results.load_table(path)
    assert read.step_ms.tolist() == [0.1, 0.2] and read.attrs["date"] == "2099-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("facts", "folder", "complaint"),
    [
        ({}, "predicted", "needs a kind"),
        ({"kind": "guessed"}, "predicted", "needs a kind"),
        ({"kind": "published"}, "published", "must name its source"),
        ({"kind": "measured"}, "measured", "must name its gpu"),
        ({"kind": "predicted", "torch": "2.5.1"}, "measured", "does not belong in results/measured"),
    ],
)
def test_the_three_kinds_are_never_mixed(study_out, facts, folder, complaint):
    path = study_out / "results" / folder / "01-x.csv"
    with pytest.raises(ValueError, match=complaint):
        results.save_table(TABLE, path, facts)
    assert not path.exists()


def test_a_prediction_is_dated_by_its_commit_and_names_no_path_of_this_machine(facts):
    assert facts == results.provenance("predicted", gpu="A40", config=facts["config"], seed=0)
    assert facts["torch"] and "+" not in facts["torch"]
    measured = results.provenance("measured", gpu="NVIDIA H200", free_bytes=149_557_477_376)
    assert measured["free_bytes"] == 149_557_477_376 and measured["date"].endswith("Z")
    for value in (facts | measured).values():
        assert str(paths.ROOT) not in str(value) and sys.prefix not in str(value)


def test_reading_falls_back_to_the_checkout_for_what_cannot_be_made_here(tmp_path, study_out, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path / "checkout")
    for kind in paths.KINDS:
        place = tmp_path / "checkout/results" / kind / "01-x.csv"
        place.parent.mkdir(parents=True)
        place.write_text(f'# kind: "{kind}"\na\n1\n')
    assert results.load_table("published/01-x.csv").attrs == {"kind": "published"}
    assert results.load_table(results.table_path("measured", "01-x")).attrs == {"kind": "measured"}
    with pytest.raises(FileNotFoundError, match="no results/predicted/01-x.csv"):
        results.load_table("predicted/01-x.csv")


def test_gpus_become_folders(study_out):
    assert results.table_path("measured", "01-x", "NVIDIA GeForce RTX 4090").parent.name == "NVIDIA-GeForce-RTX-4090"
    paths.write(results.table_path("measured", "01-x", "RTX 4090"), b"")
    assert "RTX-4090" in paths.recorded_gpus()


def test_killed_between_write_and_rename_leaves_the_old_file(tmp_path):
    target = tmp_path / "table.csv"
    target.write_bytes(b"old")
    done = in_a_new_process(
        "import os, signal; from gpt2.study import paths\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"paths.write({str(target)!r}, b'new')"
    )
    assert done.returncode == -signal.SIGKILL and target.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2  # the draft is still there ...
    alive = tmp_path / f".other.csv.{os.getpid()}.tmp"
    alive.touch()
    paths.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == [alive, target]  # ... until the next run; not that of a living writer


def test_a_full_disk_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    target = tmp_path / "table.csv"
    target.write_bytes(b"old")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        paths.write(target, b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_a_file_too_big_for_the_system_leaves_the_old_one(tmp_path):
    target = tmp_path / "table.csv"
    target.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            paths.write(target, bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def figure() -> Figure:
    drawn = Figure(figsize=(3, 2))
    axes = drawn.subplots()
    axes.plot([0, 1, 2], [0, 3, 1], label="allocated")
    axes.set_title("The peak is not where you look")
    axes.legend()
    return drawn


def test_a_figure_carries_its_alt_text(study_out):
    picture = results.save_figure(figure(), "03-peak", ALT)
    png = study_out / "figures/03-peak.png"
    svg = (study_out / "figures/03-peak.svg").read_text(encoding="utf-8")
    with Image.open(png) as image:
        assert image.text["Description"] == ALT and "Software" not in image.text
    escaped = ALT.replace("&", "&amp;").replace("<", "&lt;")
    assert f"<desc>{escaped}</desc>" in svg and f"<dc:description>{escaped}</dc:description>" in svg
    assert "<title>03-peak</title>" in svg and "<dc:date>" not in svg
    data, metadata = picture._repr_mimebundle_()
    assert data == {"image/png": png.read_bytes(), "text/plain": ALT} and metadata["image/png"]["alt"] == ALT


def test_a_figure_without_a_finding_is_refused(study_out):
    with pytest.raises(ValueError, match="alt text of 03-peak: 10 characters"):
        results.save_figure(figure(), "03-peak", "  A   picture.  ")
    assert not study_out.exists()


def test_the_same_figure_has_the_same_bytes_in_another_process(tmp_path, study_out):
    results.save_figure(figure(), "03-peak", ALT)
    done = in_a_new_process(
        "from tests.test_results import *; results.save_figure(figure(), '03-peak', ALT)",
        STUDY_OUT=str(tmp_path / "again"),
        PYTHONHASHSEED="7",
    )
    assert done.returncode == 0, done.stderr
    for form in ("png", "svg"):
        one, other = (folder / f"figures/03-peak.{form}" for folder in (study_out, tmp_path / "again"))
        assert hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(other.read_bytes()).digest()


def test_an_equal_figure_is_left_alone(study_out):
    results.save_figure(figure(), "03-peak", ALT)
    before = {path: path.stat().st_mtime_ns for path in (study_out / "figures").iterdir()}
    results.save_figure(figure(), "03-peak", ALT)
    assert before == {path: path.stat().st_mtime_ns for path in (study_out / "figures").iterdir()}
