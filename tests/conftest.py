"""Every test writes into a folder of its own run, never into the study's, and nothing lands in the user's home."""

import os
import tempfile
from pathlib import Path

import pytest

_HOME = tempfile.TemporaryDirectory(prefix="study-tests-")
os.environ.setdefault("MPLCONFIGDIR", str(Path(_HOME.name) / "matplotlib"))  # matplotlib reads it when imported
os.environ["MPLBACKEND"] = "agg"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["STUDY_OUT"] = str(Path(_HOME.name) / "out")


@pytest.fixture
def study_out(tmp_path, monkeypatch):
    """An output folder for one test alone."""
    monkeypatch.setenv("STUDY_OUT", str(tmp_path / "out"))
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def sizes_stay_as_they_were():
    """A size given by its numbers is entered among the named ones."""
    from gpt2.model import SIZES

    before = dict(SIZES)
    yield
    SIZES.clear()
    SIZES.update(before)
