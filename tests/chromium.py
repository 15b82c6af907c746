"""Debian's Chromium for the browser tests: offline, headless, with a home of its own."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

PATH = shutil.which("chromium")
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
needed = pytest.mark.skipif(PATH is None, reason="no chromium here (apt-get install chromium)")


@contextlib.contextmanager
def browser() -> Iterator:
    """A running Chromium, as Playwright sees it; the test that asks for one is skipped where there is none."""
    if PATH is None:
        pytest.skip("no chromium here (apt-get install chromium)")
    from playwright.sync_api import sync_playwright  # slow, and not needed where there is no browser

    with tempfile.TemporaryDirectory(prefix="chromium-") as home, sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=PATH, args=FLAGS, env=os.environ | {"HOME": home})
        yield opened
        opened.close()
