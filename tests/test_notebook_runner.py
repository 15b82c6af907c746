"""The runner of notebooks, tried on a small study of its own: failures, kills, two at once, and the bytes it leaves."""

import contextlib
import difflib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from gpt2.study import notebooks, paths
from gpt2.study.jupyter import clean, parameters

LIMITS = {"study": {"parameters": {"batch": {"min": 1, "max": 64}, "gpu": {"choices": ["A40", "H200"]},
                                   "lengths": {"min": 1, "max": 1024}}}}  # fmt: skip
IMPORTS = """import os, signal, sys, time, warnings
import pandas as pd
from matplotlib.figure import Figure
from gpt2.study import results"""
SAVE = """facts = results.provenance("predicted", gpu=gpu, config={"batch": batch})
table = pd.DataFrame({"peak_bytes": [batch * 1024, 7]})
results.save_table(table, results.table_path("predicted", "01-good", gpu), facts)"""
DRAW = """figure = Figure(figsize=(2, 1))
axes = figure.subplots().plot([0, batch])
results.save_figure(figure, "01-good", alt="A line that goes up to the batch, eight, and not beyond it.")"""
WIDGET = """import ipywidgets
slider = ipywidgets.IntSlider()
bundle = slider._repr_mimebundle_()
display(bundle | {"image/png": "AAAA", "text/plain": "a slider\\nat 0"}, raw=True)"""
NOISE = """warnings.warn("look out")
print("50%\\r100%")
print(os.path.abspath("x.csv"), object(), os.path.expanduser("~/secret"))"""
LIGHT = """import time
from gpt2.study import paths"""
SLEEP = """print(os.getpid(), file=open("../pid", "w"), flush=True)
time.sleep(60)"""
WRITE = """time.sleep(0.2)
changed = paths.write(paths.results() / "predicted" / "01.csv", b"the same each time")"""


def notebook(*cells: str, imports: str = IMPORTS) -> nbformat.NotebookNode:
    text = 'batch = 8  # sequences\ngpu = "A40"\nfast = False\nlengths = (64, 128)  # tokens'
    parameter = new_code_cell(text, metadata={"tags": ["parameters"]})
    code = [new_code_cell(imports), parameter, *map(new_code_cell, cells)]
    return new_notebook(cells=[new_markdown_cell("# A question?"), *code], metadata=LIMITS)


def checkout(folder: Path, **sources) -> Path:
    """A small study: our package, and notebooks of the test."""
    (folder / "notebooks").mkdir(parents=True)
    no_cache = shutil.ignore_patterns("__pycache__")
    shutil.copytree(paths.ROOT / "gpt2" / "study", folder / "gpt2" / "study", ignore=no_cache)
    for file in ("gpt2/__init__.py", "requirements.txt"):
        shutil.copy(paths.ROOT / file, folder / file)
    for name, source in sources.items():
        nbformat.write(source, folder / "notebooks" / f"{name.replace('_', '-').removeprefix('n')}.ipynb")
    return folder


def command(*words: str, code: str = "pass") -> list[str]:
    """The runner's command line; `code` runs before it, to break something."""
    quick = "sys.modules['rfc3987_syntax'] = None"  # a grammar that takes a second to build; nobody here needs it
    start = f"import sys; {quick}; {code}\nfrom gpt2.study.notebooks import main; sys.exit(main({['run', *words]!r}))"
    return [sys.executable, "-c", start]


def variables(study: Path, **more) -> dict:
    home = study.with_name("home")
    home.mkdir(exist_ok=True)
    quiet = {key: value for key, value in os.environ.items() if key not in ("STUDY_OUT", "MPLCONFIGDIR", "MPLBACKEND")}
    return quiet | {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"} | more


def run(study: Path, *words: str, code: str = "pass", **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*words, code=code), cwd=study, env=variables(study, **more), capture_output=True, text=True, timeout=60
    )


def kept(study: Path) -> dict[str, bytes]:
    """What the study holds for its readers: notebooks, tables and figures, and no leftovers."""
    found = [path for part in ("notebooks", "results", "figures") for path in (study / part).rglob("*")]
    return {str(path.relative_to(study)): path.read_bytes() for path in found if path.is_file()}


def differences(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """What differs between two sets of files, line by line."""
    told = []
    for name in sorted(one.keys() | other.keys()):
        texts = [files.get(name, b"(no file)").decode(errors="replace").splitlines() for files in (one, other)]
        told += difflib.unified_diff(*texts, name, name, n=0, lineterm="")
    return told


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study of two good notebooks and three bad ones, run once: (folder, what it held before, the run)."""
    folder = checkout(
        tmp_path_factory.mktemp("runner") / "study",
        n01_good=notebook(NOISE, SAVE, DRAW, WIDGET, "batch * 2"),
        n02_failing=notebook("x = 1", "1 / 0", "print('never')"),
        n03_killed=notebook("os.kill(os.getpid(), signal.SIGKILL)"),
        n04_widget=notebook("import ipywidgets\nipywidgets.IntSlider()"),
        n05_good=notebook("print('five')"),
    )
    before = kept(folder)
    plain = [sys.executable, "-m", "gpt2.study.notebooks", "run"]
    return folder, before, subprocess.run(plain, cwd=folder, env=variables(folder), capture_output=True, text=True)


def outputs(study: Path, name: str) -> list:
    cells = nbformat.read(study / "notebooks" / f"{name}.ipynb", as_version=4).cells
    return [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]


def test_each_notebook_is_one_line_and_a_bad_one_stops_no_other(study):
    folder, before, done = study
    lines = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert done.returncode == 1 and done.stderr == ""
    assert [line.split()[0] for line in lines[:-1]] == ["01-good", "02-failing", "03-killed", "04-widget", "05-good"]
    assert "FAILED   cell [4] `1 / 0`: ZeroDivisionError: division by zero" in lines[1]
    assert "FAILED   cell [3] `os.kill(os.getpid(), signal.SIGKILL)`: the kernel died" in lines[2]
    assert "FAILED   cell 4 shows a widget without a picture and a text beside it" in lines[3]
    assert lines[-1] == "5 notebooks, failed: 02-failing, 03-killed, 04-widget"


def test_a_failing_notebook_keeps_what_it_was(study):
    folder, before, _ = study
    changed = {name for name, data in kept(folder).items() if before.get(name) != data}
    results = {"results/predicted/A40/01-good.csv", "figures/01-good.png", "figures/01-good.svg"}
    assert changed == {"notebooks/01-good.ipynb", "notebooks/05-good.ipynb"} | results


def test_a_saved_notebook_holds_what_a_reader_sees_and_nothing_else(study):
    folder, _, done = study
    text = (folder / "notebooks/01-good.ipynb").read_text()
    saved = nbformat.reads(text, as_version=4)
    nbformat.validate(saved)
    code = [cell for cell in saved.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert set(saved.metadata) == {"kernelspec", "language_info", "study"}
    assert all(set(cell.metadata) <= {"tags"} for cell in saved.cells)
    places = str(folder), str(folder.with_name("home"))
    for gone in ("widget-view", "papermill", " at 0x", "UserWarning", "stderr", *places):
        assert gone not in text, gone
    assert "    not kept in the notebook: UserWarning: look out" in done.stdout


def test_noise_pictures_and_widgets_become_what_can_be_read_without_a_kernel(study):
    printed, table, picture, widget, value = outputs(study[0], "01-good")
    assert printed.text == "100%\nnotebooks/x.csv <object object> ~/secret\n"
    assert "5242880" not in table.data["text/plain"] and "8192" in table.data["text/plain"]
    assert picture.data["text/plain"].startswith("A line") and picture.metadata["image/png"]["alt"].startswith("A line")
    assert set(widget.data) == {"image/png", "text/plain"} and widget.metadata["image/png"]["alt"] == "a slider at 0"
    assert value.data["text/plain"] == "16"


def test_nothing_is_written_outside_the_checkout(study):
    assert list(study[0].with_name("home").rglob("*")) == []
    assert {path.name for path in study[0].iterdir()} == {
        "build", "figures", "gpt2", "notebooks", "requirements.txt", "results"
    }  # fmt: skip


def test_a_second_run_does_nothing_and_a_forced_one_changes_no_byte(study):
    folder = study[0]
    before = kept(folder)
    again = run(folder, "01", "05-good")
    assert again.returncode == 0 and again.stdout.count("up to date") == 2
    forced = run(folder, "01", "--force")
    assert forced.returncode == 0 and "up to date" not in forced.stdout
    assert kept(folder) == before


def test_a_damaged_output_is_made_again(study):
    folder = study[0]
    good = kept(folder)
    (folder / "figures/01-good.svg").write_text("damaged")
    (folder / "results/predicted/A40/01-good.csv").unlink()
    done = run(folder, "01", "05")
    assert done.stdout.count("up to date") == 1 and "05-good                 up to date" in done.stdout
    facts = b"".join(kept(folder)["results/predicted/A40/01-good.csv"].splitlines(keepends=True)[-3:])
    assert good["results/predicted/A40/01-good.csv"].endswith(facts)
    assert kept(folder)["figures/01-good.svg"] == good["figures/01-good.svg"]


def test_other_parameters_change_the_result_and_not_the_committed_study(study):
    folder = study[0]
    before = kept(folder)
    done = run(folder, "01", "-p", "batch", "2", "--fast")
    assert done.returncode == 0 and "writing to build/other" in done.stdout
    assert kept(folder) == before
    other = folder / "build" / "other"
    assert outputs(other, "01-good")[-1].data["text/plain"] == "4"
    assert b'# config: {"batch": 2}' in kept(other)["results/predicted/A40/01-good.csv"]
    injected = nbformat.read(other / "notebooks/01-good.ipynb", as_version=4).cells[3]
    assert injected.metadata.tags == ["injected-parameters"] and "fast = True" in injected.source


def test_a_bad_parameter_is_one_line_and_nothing_runs(study):
    folder = study[0]
    before = kept(folder)
    done = run(folder, "-p", "batch", "65", "--force")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: 01-good: batch = 65 is above the most, 64\n"
    assert kept(folder) == before


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (("batch", "0"), "below the least, 1"),
        (("batch", "two"), "not of the type of its default, 8"),
        (("batch", "2.5"), "not of the type"),
        (("batch", "True"), "not of the type"),
        (("gpu", "A41"), "none of A40, H200"),
        (("fast", "7"), "not of the type"),
        (("lengths", "(64, 2048)"), "lengths = 2048 is above the most, 1024"),
        (("lengths", "(64, 'x')"), "lengths = 'x' is not a number"),
        (("lengths", "64"), "not of the type"),
        (("btch", "2"), "no notebook here has the parameter btch"),
    ],
)
def test_bad_parameters(study, monkeypatch, given, complaint):
    monkeypatch.setattr(notebooks, "SOURCES", study[0] / "notebooks")
    with pytest.raises(parameters.BadParameter, match=complaint):
        notebooks.plan(["01"], [given])
    good = notebooks.plan(["01"], [("batch", "2"), ("gpu", "H200"), ("fast", "true")])
    assert good[0].given == {"batch": 2, "gpu": "H200", "fast": True}


@pytest.mark.parametrize("source", sorted((paths.ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_studys_own_notebooks_limit_what_they_are_given(source):
    book = nbformat.read(source, as_version=4)
    limits = book.metadata["study"]["parameters"]
    for name, default in parameters.declared(book).items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert "min" in limits[name], f"{name} has no least"
            with pytest.raises(parameters.BadParameter, match="below the least"):
                parameters.checked(name, str(type(default)(limits[name]["min"] - 1)), book)
        if name == "gpu":
            assert default in limits[name]["choices"]


def test_a_changed_package_or_input_makes_all_run_again(study, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", study[0])
    monkeypatch.setattr(notebooks, "SOURCES", study[0] / "notebooks")
    monkeypatch.delenv("STUDY_OUT")
    job = notebooks.plan(["05"], [])[0]
    seen = {notebooks.fingerprint(job)}
    for number, name in enumerate(("gpt2/study/new.py", "results/measured/H200/01.csv", "requirements.txt"), start=2):
        paths.write(study[0] / name, b"# changed\n")
        seen.add(notebooks.fingerprint(job))
        assert len(seen) == number
    assert notebooks.fingerprint(job) in seen


def test_only_one_cell_of_literals_holds_the_parameters():
    twice = notebook()
    twice.cells.append(twice.cells[2])
    with pytest.raises(parameters.BadParameter, match="2 cells are tagged"):
        parameters.declared(twice)
    twice.cells = [new_code_cell("batch = 2 * 4", metadata={"tags": ["parameters"]})]
    with pytest.raises(parameters.BadParameter, match="more than `name = literal`"):
        parameters.declared(twice)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A study of two good notebooks: (a folder to copy, what it holds after an undisturbed run)."""
    folder = checkout(
        tmp_path_factory.mktemp("pair") / "study",
        n01_one=notebook(WRITE, imports=LIGHT),
        n02_two=notebook("time.sleep(0.2)", "batch", imports=LIGHT),
    )
    plain = folder.with_name("plain")
    shutil.copytree(folder, plain)
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return plain, kept(folder)


def test_killed_at_20_moments_and_run_again_gives_the_same_bytes(pair, tmp_path):
    moments = random.Random(20)
    study = shutil.copytree(pair[0], tmp_path / "study")
    for _ in range(20):
        runner = subprocess.Popen(command(), cwd=study, env=variables(study), stdout=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            runner.wait(moments.uniform(0.3, 2))
        runner.kill()
        runner.wait()
        for name, data in kept(study).items():
            original = (pair[0] / name).read_bytes() if (pair[0] / name).is_file() else None
            assert data in (original, pair[1].get(name)) or name.endswith(".tmp")
        if runner.returncode == 0:  # this one came to its end: the next kills meet a new study
            assert differences(kept(study), pair[1]) == []
            shutil.rmtree(study)
            shutil.copytree(pair[0], study)
    assert run(study).returncode == 0
    assert differences(kept(study), pair[1]) == []


@pytest.mark.parametrize(("name", "redone"), [("01-one.json", 2), ("02-two.ipynb", 1)])
def test_killed_between_write_and_rename(pair, tmp_path, name, redone):
    study = shutil.copytree(pair[0], tmp_path / "study")
    deadly = (
        "import os; replace = os.replace\n"
        f"os.replace = lambda draft, to: os.kill(os.getpid(), 9) if to.name == {name!r} else replace(draft, to)"
    )
    assert run(study, code=deadly).returncode == -signal.SIGKILL
    assert len(list(study.rglob(f".{name}.*.tmp"))) == 1
    again = run(study)
    assert again.returncode == 0 and again.stdout.count("up to date") == 2 - redone
    assert differences(kept(study), pair[1]) == []


def test_two_at_once_take_turns(pair, tmp_path):
    study = shutil.copytree(pair[0], tmp_path / "study")
    start = {"cwd": study, "env": variables(study), "stdout": subprocess.PIPE, "text": True}
    first, second = (subprocess.Popen(command(), **start) for _ in range(2))
    said = first.communicate()[0], second.communicate()[0]
    assert (first.returncode, second.returncode) == (0, 0)
    waited = [text for text in said if "is at work here; waiting for it" in text]
    assert len(waited) == 1 and waited[0].count("up to date") == 2
    assert any(f"process {process.pid}" in waited[0] for process in (first, second))
    assert differences(kept(study), pair[1]) == []


def test_the_lock_of_a_dead_process_holds_nobody_up(pair, tmp_path):
    study = shutil.copytree(pair[0], tmp_path / "study")
    (study / "build/study").mkdir(parents=True)
    (study / "build/study/lock").write_text("999999999")
    done = run(study, "02")
    assert done.returncode == 0 and "waiting" not in done.stdout


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_leaves_no_kernel_behind(tmp_path, how):
    study = checkout(tmp_path / "study", n01_slow=notebook(SLEEP, imports="import os, time"))
    runner = subprocess.Popen(command(), cwd=study, env=variables(study), stderr=subprocess.PIPE, text=True)
    until(lambda: (study / "pid").is_file() and (study / "pid").read_text().endswith("\n"))
    kernel = int((study / "pid").read_text())
    runner.send_signal(how)
    said = runner.communicate(timeout=20)[1]
    assert runner.returncode == (143 if how == signal.SIGTERM else -how) and "Traceback" not in said
    until(lambda: not paths.is_alive(kernel))


def test_a_kernel_killed_from_outside_is_named_and_the_next_run_is_whole(tmp_path):
    napping = SLEEP.replace("60", 'not Path("../again").exists() and 60')
    study = checkout(tmp_path / "study", n01_nap=notebook(napping, imports="import os, time\nfrom pathlib import Path"))
    runner = subprocess.Popen(command(), cwd=study, env=variables(study), stdout=subprocess.PIPE, text=True)
    until(lambda: (study / "pid").is_file() and (study / "pid").read_text().endswith("\n"))
    os.kill(int((study / "pid").read_text()), signal.SIGKILL)
    said = runner.communicate(timeout=30)[0]
    assert runner.returncode == 1 and "01-nap" in said and "FAILED   cell [3]" in said and "the kernel died" in said
    (study / "again").touch()
    assert run(study).returncode == 0 and outputs(study, "01-nap") == []


def until(condition, seconds: float = 20) -> None:
    """Wait for a condition, and fail if it does not come about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def test_a_full_disk_is_one_line_and_keeps_the_old_notebook(pair, tmp_path):
    study = shutil.copytree(pair[0], tmp_path / "study")
    full = f"""
from gpt2.study import paths
write = paths.write
def full(path, data):
    if str(path).endswith("01-one.ipynb"):
        raise OSError({errno.ENOSPC}, "No space left on device")
    return write(path, data)
paths.write = full"""
    done = run(study, code=full)
    assert done.returncode == 1
    assert "FAILED   cannot save notebooks/01-one.ipynb: No space left on device\n" in done.stdout
    left = kept(study)
    assert left["notebooks/01-one.ipynb"] == kept(pair[0])["notebooks/01-one.ipynb"]
    assert left["notebooks/02-two.ipynb"] == pair[1]["notebooks/02-two.ipynb"]


def test_a_folder_that_takes_no_files_is_one_line(pair):
    done = run(pair[0], STUDY_OUT="/dev/null/out")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: cannot work in /dev/null/out/build/study: Not a directory\n"


def test_no_notebooks_is_no_error(tmp_path):
    done = run(checkout(tmp_path / "study"))
    assert (done.returncode, done.stdout) == (0, "no notebooks, all well\n")


def test_progress_residue_and_split_streams_become_one_text():
    cell = new_code_cell("x", execution_count=7)
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text) for text in ("a\rb", "c\n", "", "d\r\n")]
    noisy = new_notebook(cells=[cell], metadata={"widgets": {}, "papermill": {}})
    clean.clean(noisy)
    assert [output.text for output in noisy.cells[0].outputs] == ["bc\nd\n"] and cell.execution_count == 1
    assert json.loads(clean.dumps(noisy))["metadata"].keys() == {"kernelspec", "language_info"}
