"""Every notebook of the study: written as the study's notebooks are, saved clean, and running from top to bottom."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from gpt2.study import paths
from gpt2.study.jupyter import clean, parameters

SOURCES = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))
LONGEST_CELL = 12
MOST_BYTES = 1_500_000
NOT_IN_A_CELL = {
    ast.FunctionDef: "def",
    ast.AsyncFunctionDef: "def",
    ast.ClassDef: "class",
    ast.While: "while",
    ast.Try: "try",
}
A_PATH_OF_A_MACHINE = re.compile(r"(?<![\w.~/])/(home|root|Users|tmp|work|usr|var)/\w")

each = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def code_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def faults(notebook: nbformat.NotebookNode) -> list[str]:
    """Where a notebook leaves the rules, a line each: cells only call, imports come first, one cell of parameters."""
    found = []
    for number, cell in enumerate(code_of(notebook), start=1):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        if len(lines) > LONGEST_CELL:
            found.append(f"[{number}] {len(lines)} lines, more than {LONGEST_CELL}")
        for node in ast.walk(ast.parse(cell.source)):
            if type(node) in NOT_IN_A_CELL:
                found.append(f"[{number}] a {NOT_IN_A_CELL[type(node)]}; what is worth a function has a name in gpt2/")
            if isinstance(node, ast.Import | ast.ImportFrom) and number > 1:
                found.append(f"[{number}] an import; imports stand in the first code cell")
    if not notebook.cells[0].source.startswith("# "):
        found.append("the first cell is not a title")
    try:
        parameters.declared(notebook)
    except parameters.BadParameter as error:
        found.append(str(error))
    return found


def unreadable(notebook: nbformat.NotebookNode) -> list[str]:
    """Which saved outputs a reader without a kernel cannot use, or should not see."""
    counts = [cell.execution_count for cell in code_of(notebook) if cell.source.strip()]
    found = [] if counts == list(range(1, len(counts) + 1)) else [f"cells ran in the order {counts}"]
    for number, cell in enumerate(code_of(notebook), start=1):
        for output in cell.outputs:
            if output.output_type == "error":
                found.append(f"[{number}] an error: {output.ename}")
            if output.get("name") == "stderr":
                found.append(f"[{number}] a message on stderr: {output.text.strip().splitlines()[0]}")
            if "data" in output and "text/plain" not in output.data:
                found.append(f"[{number}] an output that has no text: {', '.join(output.data)}")
            if re.match(r"\(?tensor\(", output.get("data", {}).get("text/plain", "")):
                found.append(f"[{number}] ends in a tensor, which the kernel then keeps alive")
    return found


@each
def test_its_cells_only_tell_the_story(source):
    assert faults(nbformat.read(source, as_version=4)) == []


@each
def test_its_saved_outputs_can_be_read_without_a_kernel(source):
    assert unreadable(nbformat.read(source, as_version=4)) == []


@each
def test_it_was_saved_clean(source):
    saved = source.read_bytes()
    notebook = nbformat.reads(saved.decode(), as_version=4)
    clean.clean(notebook)
    assert clean.dumps(notebook) == saved, "run `make reproduce`, which saves it clean"
    assert A_PATH_OF_A_MACHINE.findall(saved.decode()) == []
    assert len(saved) < MOST_BYTES


@pytest.fixture(scope="session")
def fast_run(tmp_path_factory) -> tuple[Path, str]:
    """All notebooks run once in fast mode, into a folder of the tests: (the folder, what the runner said)."""
    out = tmp_path_factory.mktemp("notebooks")
    command = [sys.executable, "-m", "gpt2.study.notebooks", "run", "--fast"]
    environment = os.environ | {"STUDY_OUT": str(out)}
    done = subprocess.run(command, cwd=paths.ROOT, env=environment, capture_output=True, text=True)
    return out, done.stdout + done.stderr


@each
def test_it_runs_clean_from_top_to_bottom(source, fast_run):
    out, said = fast_run
    line = next((line for line in said.splitlines() if line.startswith(f"{source.stem} ")), said)
    assert "FAILED" not in line, line
    executed = nbformat.read(out / "notebooks" / source.name, as_version=4)
    assert unreadable(executed) == []


def test_the_rules_are_seen_when_they_are_broken():
    long = new_code_cell("\n".join(["x = 1"] * 13))
    wrong = new_code_cell("import os\ndef f():\n    while True:\n        pass", execution_count=7)
    wrong.outputs = [
        new_output("stream", name="stderr", text="careful\n"),
        new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}),
        new_output("execute_result", {"text/plain": "tensor([1.])"}),
        new_output("error", ename="ValueError"),
    ]
    bad = new_notebook(cells=[new_markdown_cell("no title"), long, wrong])
    assert [fault.split("; ")[0] for fault in faults(bad)] == [
        "[1] 13 lines, more than 12",
        "[2] an import",
        "[2] a def",
        "[2] a while",
        "the first cell is not a title",
        "0 cells are tagged `parameters`, there must be one",
    ]
    assert [fault.split(": ")[0] for fault in unreadable(bad)] == [
        "cells ran in the order [None, 7]",
        "[2] a message on stderr",
        "[2] an output that has no text",
        "[2] ends in a tensor, which the kernel then keeps alive",
        "[2] an error",
    ]
    assert A_PATH_OF_A_MACHINE.search('"/home/jo/x.csv"') and not A_PATH_OF_A_MACHINE.search("~/x and results/tmp/x")
