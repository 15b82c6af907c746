"""Ordinary scripts on a card that is not here: `python -m gpt2 simulate ... script.py args...`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2.cli import main
from gpt2.memory import gpus
from gpt2.memory.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tests" / "scripts"
MIB = 2**20
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # that values are read is the subject here


@pytest.fixture
def simulate(tmp_path, monkeypatch, capfd):
    """Runs a script of tests/scripts in this process: (status, its standard output, standard error, JSON)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)

    def run(script: str, *words: str, options: tuple[str, ...] = ("--gpu", "A40", "--torch", "2.11.0")):
        answer = tmp_path / "answer.json"
        status = main(["simulate", *options, "--json", str(answer), str(SCRIPTS / script), *words])
        out, err = capfd.readouterr()
        return status, out, err, json.loads(answer.read_text())

    return run


def test_raw_loop_with_arguments_of_its_own(simulate):
    status, out, err, found = simulate("raw_loop.py", "--width", "4096", "--gpu", "theirs", "--steps", "4")
    assert status == 0
    assert out.count("loss nan") == 4 and "--gpu theirs" in out
    peak = int(out.split("peak ")[1].split()[0])
    assert list(found) == ["kind", "gpu", "torch", "fits", "peak_allocated_bytes", "peak_reserved_bytes", "per_step",
                           "peak", "ledger", "out_of_memory", "argv", "error", "caught"]
    assert (found["kind"], found["gpu"], found["torch"], found["fits"]) == ("predicted", "A40", "2.11.0", True)
    assert found["peak_allocated_bytes"] == peak == sum(row["bytes"] for row in found["ledger"])
    assert [row["step"] for row in found["per_step"]] == [1, 2, 3, 4]
    assert found["argv"][1:] == ["--width", "4096", "--gpu", "theirs", "--steps", "4"]
    assert "predicted for A40, torch 2.11.0" in err and "predicted" not in out


def test_the_model_is_counted_to_the_byte(simulate):
    _, out, _, found = simulate("raw_loop.py", "--width", "4096")
    parameters = 4 * (64 * 4096 + 4096 + 4096 * 10 + 10)
    ledger = {row["category"]: row["bytes"] for row in found["ledger"]}
    assert ledger["parameters"] == parameters
    assert ledger["optimizer state"] == 2 * parameters


def test_peaks_are_those_of_the_whole_run(simulate, tmp_path):
    (tmp_path / "first.py").write_text(
        "import torch\nnet = torch.nn.Linear(64, 64).cuda()\noptimizer = torch.optim.SGD(net.parameters())\n"
        "for rows in (2**18, 16, 16):\n    net(torch.ones(rows, 64, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n")
    *_, found = simulate(str(tmp_path / "first.py"))
    first, second, _ = (row["peak_allocated_bytes"] for row in found["per_step"])
    assert first == found["peak_allocated_bytes"] > second and found["peak"]["step"] == 1


def test_loader_pinned_autocast_and_scaler(simulate):
    status, out, _, found = simulate("loader.py")
    assert status == 0 and found["fits"]
    assert out.endswith("cuda True\n") and "epoch 1 mean loss nan" in out
    assert [row["step"] for row in found["per_step"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("word", ["plain", "mask"])
def test_transformers_model(simulate, word):
    status, out, err, found = simulate("language_model.py", word)
    assert status == 0, err
    assert "'step': 2, 'loss': nan" in out and "torch.Size([4, 128, 1000])" in out
    assert found["peak"]["phase"] == "backward"


def test_what_a_script_asks_of_its_gpu(simulate, tmp_path):
    status, out, err, _ = simulate("questions.py")
    assert status == 0, err
    lines = dict(line.split(" ", 1) for line in out.splitlines() if not line.startswith("|"))
    workspace, matrix, card = 8_519_680, 4_000_256, gpus.find("A40")
    assert lines["name"] == "NVIDIA A40 NVIDIA A40" and lines["capability"] == "(8, 6)"
    assert lines["count"] == "1 True 0" and lines["total"] == str(card.memory_bytes)
    assert lines["allocated"] == f"{workspace + matrix} {workspace + 2 * matrix}"
    assert lines["reserved"] == f"{20 * MIB} {20 * MIB}"
    assert lines["free"] == f"{card.free_bytes_at_start - 20 * MIB} {card.memory_bytes}"
    assert lines["stats"] == f"{workspace + matrix} 0 1" and "CUDA memory summary" in out
    assert lines["snapshot"] == "1 True" and lines["list"] == "1" and lines["after"] == f"{20 * MIB} 0.5"
    assert main(["snapshot", str(tmp_path / "snapshot.pickle")]) == 0


def test_out_of_memory_is_an_answer_with_its_traceback(simulate):
    status, out, err, found = simulate("out_of_memory.py")
    assert (status, out) == (0, "")
    assert "Traceback" in err and 'out_of_memory.py", line 15, in <module>' in err and "in grow" in err
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity" in err
    assert "gpt2/" not in err.split("torch.OutOfMemoryError")[0].replace(str(SCRIPTS), "")
    assert not found["fits"] and found["out_of_memory"]["requested_bytes"] == 9 * 2**30 and found["caught"] == []


def test_a_caught_failure_goes_on(simulate):
    status, out, err, found = simulate("out_of_memory.py", "catch")
    assert status == 0 and found["fits"] and found["out_of_memory"] is None
    assert out == "caught: CUDA out of memory. Tried to allocate 9.00 GiB\nthen torch.Size([1024])\n"
    assert [row["requested_bytes"] for row in found["caught"]] == [9 * 2**30] and "caught" in err


def test_a_limit_is_where_it_ends(simulate):
    *_, found = simulate("out_of_memory.py", options=("--gpu", "H200", "--limit-mib", "1000"))
    assert not found["fits"] and found["peak_reserved_bytes"] <= 1000 * MIB


def test_a_branch_on_a_value_names_the_line(simulate):
    status, out, err, found = simulate("branches.py")
    assert (status, out, found["fits"]) == (1, "", None)
    assert f"error: {SCRIPTS / 'branches.py'}:6:" in err and "Traceback" not in err
    assert "ValueReadError" in found["error"]


def test_a_script_that_fails_shows_its_traceback(simulate):
    status, out, err, found = simulate("fails.py")
    assert status == 1 and found["fits"] is None and found["error"].startswith("RuntimeError")
    shown = err.split("\nRuntimeError")[0]
    assert shown.startswith("Traceback (most recent call last):")
    places = [line.split(",")[1].strip() for line in shown.splitlines() if line.startswith("  File")]
    assert places == ["line 18", "line 10"]


@pytest.mark.parametrize(("word", "status", "said"), [("exit", 7, "leaving"), ("text", 1, "no such data set")])
def test_exit_statuses_pass_through(simulate, word, status, said):
    found = simulate("fails.py", word)
    assert found[0] == status and said in found[1] + found[2] and "Traceback" not in found[2]


def test_syntax_errors_look_like_pythons(simulate, tmp_path):
    (tmp_path / "broken.py").write_text("x = (\n")
    status, _, err, _ = simulate(str(tmp_path / "broken.py"))
    assert status == 1 and err.startswith('  File "') and "SyntaxError: '(' was never closed" in err


def test_settings_of_the_environment(simulate, monkeypatch, capfd):
    plain = simulate("raw_loop.py", "--width", "1234")[3]["peak_allocated_bytes"]
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "roundup_power2_divisions:1,roundup_power2_divisions:2")
            assert simulate("raw_loop.py", "--width", "1234")[3]["peak_allocated_bytes"] > plain
            options = ("--gpu", "A40", "--torch", "2.11.0", "--alloc-conf", "")
            assert simulate("raw_loop.py", "--width", "1234", options=options)[3]["peak_allocated_bytes"] == plain
            patch.setenv(name, "no_such_option:1")
            assert main(["simulate", "--gpu", "A40", str(SCRIPTS / "raw_loop.py")]) == 2
            assert capfd.readouterr().err.startswith("error: unknown allocator option 'no_such_option'")


def test_settings_that_a_script_makes_before_torch(simulate, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    status, out, err, _ = simulate("environment.py")
    assert (status, out) == (0, f"{20 * MIB} True\n"), err


def test_trace_and_snapshot_are_saved(simulate, tmp_path, capfd):
    trace, snapshot = tmp_path / "out.json.gz", tmp_path / "out.pickle"
    for path in (trace, snapshot):
        *_, found = simulate("raw_loop.py", options=("--gpu", "A40", "--torch", "2.11.0", "--trace", str(path)))
        assert main(["snapshot", str(path), "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["peak"]["allocated_bytes"] == found["peak_allocated_bytes"]
    assert main(["diff", str(trace), str(trace)]) == 0
    assert capfd.readouterr().out.startswith("identical")


def test_a_script_that_takes_nothing_leaves_a_trace_without_events(simulate, tmp_path):
    (tmp_path / "nothing.py").write_text("print('no card')\n")
    status, _, _, found = simulate(str(tmp_path / "nothing.py"), options=("--gpu", "A40", "--trace", "t.json.gz"))
    assert status == 0 and found["peak_allocated_bytes"] == 0 and len(Trace.load(tmp_path / "t.json.gz")) == 0


def test_torchscript_stays_python(simulate, tmp_path):
    (tmp_path / "scripted.py").write_text(
        "import torch\n@torch.jit.script\ndef twice(x):\n    return x + torch.tensor(2.0)\n"
        "print(twice(torch.ones(256, device='cuda')).shape)\n")
    status, out, err, found = simulate(str(tmp_path / "scripted.py"))
    assert status == 0 and "torch.Size([256])" in out, err
    assert found["peak_allocated_bytes"] == 2 * 1024


def test_who_keeps_the_peak_alive(simulate):
    options = ("--gpu", "A40", "--torch", "2.11.0", "--keeps")
    _, out, err, found = simulate("raw_loop.py", "--width", "4096", options=options)
    assert out.count("step 0") == 1 and err.count("step 0") == 0, "it is heard once, however often it runs"
    assert "saved for backward: ReluBackward0" in err
    large = sum(row["bytes"] for row in found["keeps"]["rows"])
    assert 0.8 * found["peak_allocated_bytes"] < large <= found["peak_allocated_bytes"]
    *_, found = simulate("out_of_memory.py", "catch", options=options)
    assert all("kept[" in row["keeper"] for row in found["keeps"]["rows"][1:])


def test_as_from_a_shell(tmp_path):
    """The script finds itself as `python script.py` would have it: name, file, arguments, path; so does a module."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "beside.py").write_text("word = 'found'\n")
    (inside / "where.py").write_text(
        "import os, sys, beside\n"
        "print(__name__, os.path.basename(__file__), sys.argv[1:], beside.word, sys.modules['__main__'].__name__)\n")
    for folder, words in ((tmp_path, ["inside/where.py"]), (inside, ["-m", "where"])):
        command = [sys.executable, "-m", "gpt2", "simulate", "--gpu", "T4", *words, "-m", "--json", "x"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
        assert done.stdout == "__main__ where.py ['-m', '--json', 'x'] found __main__\n"


@pytest.mark.parametrize(("options", "said"), [
    (("--json", "train.py"), "--json of simulate takes a file or -"),
    (("--json", "notes.txt"), "--json of simulate takes a file or -"),
    (("--json", "new.py"), "--json of simulate takes a file or -"),
    (("--json", "nowhere/a.json"), "cannot write nowhere/a.json: there is no folder nowhere"),
    (("--json", "folder"), "cannot write folder: it is a directory"),
    (("--trace", "nowhere/t.json.gz"), "cannot write nowhere/t.json.gz: there is no folder nowhere"),
    (("--trace", "folder"), "cannot write folder: it is a directory"),
    (("--trace", "train.py"), "train.py is a script"),
])
def test_where_nothing_can_be_written_nothing_is_run(options, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {"train.py": "print('it ran')\n", "notes.txt": "do not lose these\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    for words in (["train.py"], []):  # a forgotten argument takes the script's place
        assert main(["simulate", "--gpu", "A40", *options, *words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and said in err
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_json_replaces_json_and_what_is_empty(simulate, tmp_path):
    (tmp_path / "nothing.py").write_text("import os\nos.mkdir('inside')\nos.chdir('inside')\n")
    (tmp_path / "empty").touch()
    (tmp_path / "old.json").write_text("{}")
    for name in ("empty", "old.json"):
        options = ("--gpu", "A40", "--json", name)
        assert main(["simulate", *options, str(tmp_path / "nothing.py")]) == 0
        os.chdir(tmp_path)
        os.rmdir("inside")
        assert json.loads((tmp_path / name).read_text())["peak_allocated_bytes"] == 0


def test_a_directory_is_no_script(tmp_path, capsys):
    assert main(["simulate", "--gpu", "A40", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"error: {tmp_path} is a directory without a __main__.py\n"
