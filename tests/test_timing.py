"""The timing program, run in miniature on a simulated GPU: its tables have their columns; and how it fails."""

from contextlib import contextmanager

import pytest
import torch

from gpt2.memory.simulator import SimulatedGpu
from gpt2.study import results
from gpt2.study.timing import run, stopwatch, sync_costs

NEEDS_A_VALUE = {"clip"}  # error_if_nonfinite reads the norm


class Graph:
    """Stands for a CUDA graph."""

    def replay(self):
        pass


@contextmanager
def capture(graph):
    yield


@pytest.fixture
def card(monkeypatch):
    with SimulatedGpu("H200") as simulated:
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        calm = {name: habit for name, habit in sync_costs.HABITS.items() if name != "condition"}
        monkeypatch.setattr(sync_costs, "HABITS", calm)
        yield simulated


@pytest.mark.filterwarnings("ignore:.*reads the value of a simulated tensor")
@pytest.mark.parametrize("name", [name for name in run.EXPERIMENTS if name not in NEEDS_A_VALUE])
def test_each_experiment_runs_in_miniature(card, monkeypatch, name):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    tables = run.EXPERIMENTS[name](tiny=True)
    from_the_profiler = ("05-kernels", "05-timeline")  # it has no kernels to see here
    assert tables and all(len(table) or key.startswith(from_the_profiler) for key, table in tables.items())
    for key, table in tables.items():
        assert key[:3] in ("05-", "06-")
        assert not any(column.endswith(("_mb", "_gb")) for column in table.columns)
        for column in (c for c in table.columns if c.endswith("_bytes")):
            assert (table[column].dropna() % 1 == 0).all(), column


def test_one_that_fails_is_a_row_and_stops_nothing(tmp_path, monkeypatch, capsys):
    def broken(tiny):
        raise ValueError("what was wrong\nand a second line")

    monkeypatch.setitem(run.EXPERIMENTS, "broken", broken)
    row = run.run("broken", tmp_path, {}, tiny=True)
    assert row["error"] == "ValueError: what was wrong" and row["row_count"] == 0
    assert "broken" in capsys.readouterr().out


def test_tables_carry_where_they_were_measured(tmp_path, monkeypatch):
    import pandas as pd

    monkeypatch.setitem(run.EXPERIMENTS, "one", lambda tiny: {"05-one": pd.DataFrame({"time_ms": [1.5]})})
    about = results.provenance("measured", gpu="NVIDIA H200")
    assert run.run("one", tmp_path, about, tiny=True)["row_count"] == 1
    assert results.load_table(tmp_path / "05-one.csv").attrs["gpu"] == "NVIDIA H200"


def test_a_simulated_gpu_is_not_timed(tmp_path, capsys):
    assert run.main([str(tmp_path / "out")]) == 2
    with SimulatedGpu("H200"):
        assert run.main([str(tmp_path / "out")]) == 2
    assert "has no time" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_spread_is_median_and_tenths():
    assert stopwatch.spread([float(n) for n in range(11)], "host") == {
        "host_ms": 5.0, "host_p10_ms": 1.0, "host_p90_ms": 9.0, "repeat_count": 11}
