"""A snapshot of an H200, dumped by a transformers training loop that knows nothing of this study, read to the byte.

`hf-gpt2` was recorded from before the model was built, `hf-gpt2-late` from after it: its parameters have no stack.
"""

import json
import runpy
from pathlib import Path

import pytest

from gpt2.memory.replay import replay
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.snapshot import read, to_trace
from gpt2.memory.summary import summary
from gpt2.memory.trace import Trace

FOLDER = Path(__file__).parent.parent / "results" / "measured" / "h200" / "snapshots"
NAMES = ("hf-gpt2", "hf-gpt2-late")


def facts(name: str) -> dict:
    """What the script itself read from torch.cuda at its end."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def trace(name: str, parameters: bool = False) -> Trace:
    named = {int(k): v for k, v in facts(name)["parameters"].items()} if parameters else None
    return to_trace(read(FOLDER / f"{name}.pickle"), parameters=named)


@pytest.mark.parametrize("name", NAMES)
def test_its_peaks_are_those_that_the_run_read(name):
    found, known = trace(name), facts(name)
    assert max(found.allocated_bytes()) == known["max_memory_allocated"] == 1_153_287_168
    assert max(found.reserved_bytes()) == known["max_memory_reserved"]
    assert found.allocated_bytes()[-1] == known["memory_allocated"]


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_at_its_peak_have_owners(name):
    table, known = summary(trace(name)), facts(name)
    assert table["known_share_ratio"] >= 0.99
    sizes = {row["category"]: row["bytes"] for row in table["categories"]}
    assert sum(sizes.values()) == known["max_memory_allocated"]
    assert "unknown" not in sizes
    # A block may be up to 1 MiB larger than what was asked for.
    assert known["parameter_bytes"] <= sizes["parameters"] <= 1.03 * known["parameter_bytes"]
    assert known["moments_bytes"] <= sizes["optimizer state"] <= 1.03 * known["moments_bytes"]
    assert table["peak"]["step"] == 2 and table["peak"]["phase"] == "backward"


def test_a_recording_that_began_after_the_model_matches_its_parameters_by_address():
    found, known = trace("hf-gpt2-late", parameters=True), facts("hf-gpt2-late")
    assert "76 blocks were already there" in found.meta["warnings"][0]
    older = [b.event for b in found.blocks() if b.event.phase == "before the recording"]
    assert {e.module for e in older} == set(known["parameters"].values())
    assert {e.category for e in older} == {"parameters"}
    assert summary(found)["known_share_ratio"] >= 0.99


def test_the_two_recordings_agree_on_who_owns_the_peak():
    early, late = (summary(trace(name))["categories"] for name in NAMES)
    assert early == late


def test_its_steps_are_four_and_nothing_grows():
    steps = summary(trace("hf-gpt2"))["steps"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert {row["growth_bytes"] for row in steps} == {0}


def test_replayed_it_takes_what_it_took():
    result, known = replay(trace("hf-gpt2"), gpu="H200"), facts("hf-gpt2")
    assert result.fits and result.known_to_the_end
    assert result.peak_allocated_bytes == known["max_memory_allocated"]
    assert result.peak_reserved_bytes == known["max_memory_reserved"]
    small = replay(trace("hf-gpt2"), gpu="H200", limit_bytes=2**30)
    assert not small.fits and "Tried to allocate" in small.message


def test_the_same_script_simulated_takes_what_the_card_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["hf_loop.py", "early"])
    with SimulatedGpu("H200", torch="2.11.0"):
        runpy.run_path(str(FOLDER.parents[3] / "notebooks" / "scripts" / "hf_loop.py"), run_name="__main__")
    simulated, known = json.loads((tmp_path / "hf.json").read_text()), facts("hf-gpt2")
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        assert simulated[name] == known[name], name
    assert max(to_trace(read(tmp_path / "hf.pickle")).allocated_bytes()) == known["max_memory_allocated"]
