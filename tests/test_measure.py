"""Recording on a real GPU, as far as a machine without one can test it."""

import subprocess
import sys

import pytest

from gpt2.study import measure, paths
from gpt2.study.experiments import EXPERIMENTS


def run(*words):
    command = [sys.executable, "-m", "gpt2.study.measure", *words]
    return subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True)


def test_without_a_gpu_it_says_so_in_a_line(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = run()
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: there is no CUDA GPU here") and done.stderr.count("\n") == 1


def test_by_default_everything_that_the_notebooks_show(tmp_path):
    names = {experiment.name for experiment in measure.wanted("", "", tmp_path)}
    assert {"base", "plain", "readings", "drop-logits", "length-512", "sweep-21", "sweep-22-expandable"} <= names
    assert {e.name for e in EXPERIMENTS.values() if {"sweep", "exact", "savings"} & set(e.tags)} == names


def test_what_is_finished_is_not_run_again(tmp_path):
    (tmp_path / "base.json.gz").write_bytes(b"")
    assert [e.name for e in measure.wanted("", "base,plain", tmp_path)] == ["plain"]


@pytest.mark.parametrize("tags, names, word", [("swep", "", "swep"), ("", "bass", "bass")])
def test_unknown_words_are_named(tmp_path, tags, names, word):
    with pytest.raises(ValueError, match=f"unknown .* {word}; known: "):
        measure.wanted(tags, names, tmp_path)


def test_without_instruments_nothing_is_labelled():
    from gpt2.study.experiments import predict

    trace = predict(EXPERIMENTS["plain"], "A40", torch_release="2.5.1")
    assert [mark.name for mark in trace.marks] == ["end"]
