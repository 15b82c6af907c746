"""A reader in a browser: a real JupyterLab, a real Chromium, Run All, and a hand on the slider."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from gpt2.study import clean, lab, paths

SOURCES = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))
WITH_WIDGETS = [source.name for source in SOURCES if "widgets." in source.read_text(encoding="utf-8")]
CHROMIUM = shutil.which("chromium")
TOKEN = "a-token-for-the-tests"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SLIDER = """slider = widgets.IntSlider(description="moment", min=0, max=54)
readout = widgets.HTML()
widgets.dlink((slider, "value"), (readout, "value"), lambda moment: f"<b class='readout'>moment {moment} of 54</b>")
widgets.VBox([slider, readout])"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)")


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
def browser(tmp_path_factory):
    from playwright.sync_api import sync_playwright  # slow, and not needed where there is no browser

    with sync_playwright() as playwright:
        home = {"HOME": str(tmp_path_factory.mktemp("chromium"))}
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, env=os.environ | home)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    """A new page; a test fails if the page's own code does."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    errors = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    opened.close()
    assert errors == []


def run_all(page, server: str, name: str, seconds: float = 120):
    """Open a notebook, run all its cells, wait until the last one is done; returns the notebook's panel."""
    page.goto(f"{server}/lab/workspaces/{Path(name).stem}/tree/{name}?token={TOKEN}&reset")
    panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    panel.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=60_000)
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


@pytest.mark.parametrize("name", WITH_WIDGETS)
def test_the_widgets_of_a_notebook_answer_to_the_keyboard(page, server, name):
    panel = run_all(page, server, name)
    assert panel.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    output = panel.locator(".jp-OutputArea-output", has=page.locator(".noUi-handle")).first
    before = output.inner_html()
    output.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    until(lambda: output.inner_html() != before, seconds=10)


def test_a_cell_that_fails_is_seen(page, server, folder):
    save(folder / "broken.ipynb", new_code_cell("1 / 0"))
    panel = run_all(page, server, "broken.ipynb")
    panel.get_by_text("ZeroDivisionError: division by zero").wait_for(timeout=10_000)
