"""The programs of the study say how they are called, and that they need a GPU, before they begin."""

import importlib

import pytest
import torch

ALONE = ["interactive.grid", "findings.worked_example", "bench", "probes.convolution_choices",
         "probes.convolution_nets"]
ON_A_GPU = ["probes.kernels", "probes.convolutions", "probes.recurrent", "probes.recurrent_sizes"]


def module(name):
    return importlib.import_module(f"gpt2.study.{name}")


@pytest.mark.parametrize("name", ALONE + ON_A_GPU)
def test_help_is_all_that_help_does(name, capsys):
    with pytest.raises(SystemExit) as ended:
        module(name).main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and out.startswith(f"usage: python -m gpt2.study.{name} [-h]")
    assert module(name).__doc__.splitlines()[0].split()[0] in out


@pytest.mark.parametrize("name", ALONE + ON_A_GPU)
def test_a_word_nobody_knows_starts_nothing(name, capsys):
    with pytest.raises(SystemExit) as ended:
        module(name).main(["--nonsense"])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("usage: ")


@pytest.mark.parametrize("name", ["probes.kernels", "probes.recurrent", "probes.recurrent_sizes"])
def test_without_a_file_a_probe_prints_its_usage(name, capsys):
    with pytest.raises(SystemExit) as ended:
        module(name).main([])
    assert ended.value.code == 2 and "usage: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ON_A_GPU)
def test_without_a_gpu_a_probe_says_so_in_a_line(name, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module(name).main([str(tmp_path / "x")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: there is no CUDA GPU here") and captured.err.count("\n") == 1
    assert not captured.out and not list(tmp_path.iterdir())
