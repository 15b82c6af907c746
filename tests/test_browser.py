"""A reader in a browser: a real JupyterLab, a real Chromium, Run All, and a hand on the slider."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import chromium
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from gpt2.cli import main
from gpt2.study import paths
from gpt2.study.jupyter import clean, lab

SOURCES = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))
WITH_WIDGETS = [source.name for source in SOURCES if "widgets." in source.read_text(encoding="utf-8")]
RUN_WHOLE, OPENED = WITH_WIDGETS[:2], [source.name for source in SOURCES if source.name not in WITH_WIDGETS[:2]][:2]
TOKEN = "a-token-for-the-tests"
MIB = 2**20
SLIDER = """slider = widgets.IntSlider(description="moment", min=0, max=54)
readout = widgets.HTML()
widgets.dlink((slider, "value"), (readout, "value"), lambda moment: f"<b class='readout'>moment {moment} of 54</b>")
widgets.VBox([slider, readout])"""

CALCULATOR = """asked = []
shown = widgets.calculator(exactly=lambda setting, gpu: asked.append(setting.batch) or by_simulation(setting, gpu))
shown"""
COUNTED = """print("simulated", asked, "drawn", shown.redraws)"""

pytestmark = chromium.needed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition, seconds: float = 60) -> None:
    """Wait for a condition, and fail if it does not come about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What JupyterLab shows: copies of the study's notebooks, and one of the tests."""
    shown = tmp_path_factory.mktemp("lab") / "shown"
    shown.mkdir()
    for source in SOURCES:
        cells = nbformat.read(source, as_version=4).cells
        for cell in cells:
            cell.source = re.sub(r"^fast = False", "fast = True", cell.source, flags=re.MULTILINE)
        save(shown / source.name, *cells)
    cells = [new_code_cell("import ipywidgets as widgets"), new_code_cell(SLIDER), new_code_cell("print('the', 'end')")]
    save(shown / "tiny.ipynb", new_markdown_cell("# Does the slider move?"), *cells)
    start = "from gpt2.study import widgets\nfrom gpt2.study.interactive.calculator import by_simulation"
    save(shown / "knobs.ipynb", *map(new_code_cell, (start, CALCULATOR, COUNTED)))
    return shown


def save(path: Path, *cells) -> None:
    """Write a notebook that has not run yet."""
    path.write_bytes(clean.dumps(clean.strip(new_notebook(cells=list(cells)))))


@pytest.fixture(scope="module")
def server(folder) -> Iterator[str]:
    """The address of a JupyterLab of this interpreter, which writes only into the tests' folders."""
    port, home = free_port(), folder.with_name("home")
    address = f"http://127.0.0.1:{port}"
    options = [f"--port={port}", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}"]
    options += ["--no-browser", "--ServerApp.allow_root=True", "--log-level=ERROR", *lab.OPTIONS]
    whole = home / "jupyter/lab/settings/@jupyterlab/notebook-extension/tracker.jupyterlab-settings"
    whole.parent.mkdir(parents=True)
    whole.write_text('{"windowingMode": "none"}')  # every cell in the page, also those out of sight
    environment = os.environ | lab.prepare(home) | {"STUDY_OUT": str(folder.with_name("out"))}
    with open(folder.with_name("log"), "w") as log:
        command = [sys.executable, "-m", "jupyterlab", *options]
        jupyter = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        until(lambda: answers(f"{address}/api/status?token={TOKEN}") or jupyter.poll() is not None)
        assert jupyter.poll() is None, folder.with_name("log").read_text()
        yield address
    finally:
        jupyter.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            jupyter.wait(10)
        jupyter.kill()


def answers(url: str) -> bool:
    with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5) as reply:
        return reply.status == 200
    return False


@pytest.fixture(scope="module")
def browser():
    with chromium.browser() as opened:
        yield opened


@pytest.fixture
def page(browser):
    """A new page; a test fails if the page's own code does."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    errors = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    opened.close()
    assert errors == []


def open_notebook(page, server: str, name: str):
    """Open a notebook; returns its panel."""
    page.goto(f"{server}/lab/workspaces/{Path(name).stem}/tree/{name}?token={TOKEN}&reset")
    panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    panel.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=60_000)
    return panel


def run_all(page, server: str, name: str, seconds: float = 120):
    """Open a notebook, run all its cells, wait until the last one is done; returns the notebook's panel."""
    panel = open_notebook(page, server, name)
    page.locator(".jp-StatusBar-TextItem", has_text="Python 3 | Idle").first.wait_for(timeout=60_000)
    prompts = panel.locator(".jp-CodeCell .jp-InputArea-prompt")
    for _ in range(10):  # JupyterLab forgets the order if its kernel is not quite there
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        with contextlib.suppress(AssertionError):
            until(lambda: set(prompts.all_text_contents()) != {"[ ]:"}, seconds=3)
            break
    until(lambda: all(re.fullmatch(r"\[\d+\]:", text) for text in prompts.all_text_contents()), seconds)
    return panel


def test_the_slider_moves_the_readout(page, server):
    panel = run_all(page, server, "tiny.ipynb")
    readout = panel.locator(".readout")
    readout.wait_for()
    assert readout.text_content() == "moment 0 of 54"
    handle = panel.locator(".noUi-handle")
    handle.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    panel.get_by_text("moment 3 of 54").wait_for(timeout=10_000)
    box = panel.locator(".noUi-base").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 1, box["y"] + box["height"] / 2)
    panel.get_by_text("moment 54 of 54").wait_for(timeout=10_000)


@pytest.mark.parametrize("name", RUN_WHOLE)
def test_the_widgets_of_a_notebook_answer(page, server, folder, name):
    panel = run_all(page, server, name)
    assert panel.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    if panel.locator(".noUi-handle").count():
        walk(page, panel)
    else:
        guess(panel, folder.with_name("out") / "build" / "guesses.json")


def walk(page, panel) -> None:
    """Keys, a drag, a button and play, on the walk through the step."""
    output = panel.locator(".jp-OutputArea-output", has=page.locator(".noUi-handle")).first
    total, handle = output.locator(".words b"), output.locator(".noUi-handle").first
    output.get_by_role("button", name="forward", exact=True).click()
    until(lambda: total.inner_text() != "17,053.9 MiB allocated", seconds=10)
    handle.focus()
    for step in (lambda: page.keyboard.press("ArrowRight"), lambda: drag(page, output)):
        before = total.inner_text()
        step()
        until(lambda before=before: total.inner_text() != before, seconds=10)
    assert milliseconds(page, output, handle) < 50
    output.get_by_role("button", name="peak", exact=True).click()
    until(lambda: total.inner_text() == "17,053.9 MiB allocated", seconds=10)
    output.locator(".jupyter-widgets.widget-play button").first.click()
    until(lambda: total.inner_text() != "17,053.9 MiB allocated", seconds=10)
    assert output.locator(".words b").count() == 1


def milliseconds(page, output, handle) -> float:
    """The median of 21 keys, from the key to the picture that the kernel drew."""
    output.evaluate("""(output) => {
        let start = 0;
        output.taken = [];
        output.addEventListener("keydown", () => { start = performance.now(); }, true);
        new MutationObserver(() => { if (start) { output.taken.push(performance.now() - start); start = 0; } })
            .observe(output.querySelector(".walk").parentElement, {childList: true, subtree: true}); }""")
    handle.focus()
    for pressed in range(21):
        page.keyboard.press("ArrowLeft" if pressed % 2 else "ArrowRight")
        until(lambda pressed=pressed: len(output.evaluate("output => output.taken")) > pressed, seconds=10)
    return sorted(output.evaluate("output => output.taken"))[10]


def drag(page, output) -> None:
    """The slider's handle, from where it is to the middle, in steps as a hand makes them."""
    handle, base = (output.locator(name).first.bounding_box() for name in (".noUi-handle", ".noUi-base"))
    page.mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2)
    page.mouse.down()
    page.mouse.move(base["x"] + base["width"] / 2, base["y"], steps=12)
    page.mouse.up()


def guess(panel, kept: Path) -> None:
    """A number written into the form of guesses is kept in the reader's own file."""
    field = panel.locator(".widget-text input").first
    field.fill("95")
    field.press("Enter")
    until(lambda: kept.is_file() and json.loads(kept.read_text()).get("optimizer") == 95, seconds=10)


def test_a_burst_of_50_keys_is_one_simulation_and_equals_predict(page, server, capsys):
    panel = run_all(page, server, "knobs.ipynb")
    output = panel.locator(".jp-OutputArea-output", has=page.locator(".noUi-handle")).first
    output.locator(".noUi-handle").first.focus()
    for key in ["ArrowRight"] * 31 + ["ArrowLeft"] * 19:
        page.keyboard.press(key)
    exact = output.locator("tr:has(td:text-is('allocated')) td").nth(2)
    assert main("predict --gpu A40 --torch 2.5.1 --batch 20 --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    until(lambda: exact.inner_text() == f"{found['peak_allocated_bytes'] / MIB:,.1f}", seconds=30)
    assert output.locator("svg").count() == 1
    last = panel.locator(".jp-CodeCell").last
    last.locator(".jp-Editor").click()
    page.keyboard.press("Control+Enter")
    last.get_by_text(re.compile(r"simulated \[8, 8, 20\]|simulated \[8, 20\]")).wait_for(timeout=10_000)


@pytest.mark.parametrize("name", OPENED)
def test_other_notebooks_open_whole(page, server, name):
    panel = open_notebook(page, server, name)
    cells = nbformat.read(paths.ROOT / "notebooks" / name, as_version=4).cells
    until(lambda: panel.locator(".jp-Notebook .jp-Cell").count() == len(cells), seconds=20)
    assert panel.locator("h1").first.inner_text().strip("¶") == cells[0].source.splitlines()[0].removeprefix("# ")


def test_a_cell_that_fails_is_seen(page, server, folder):
    save(folder / "broken.ipynb", new_code_cell("1 / 0"))
    panel = run_all(page, server, "broken.ipynb")
    panel.get_by_text("ZeroDivisionError: division by zero").wait_for(timeout=10_000)
