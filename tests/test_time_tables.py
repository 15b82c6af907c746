"""Notebooks 05 and 06: predictions against the recording, a finding for each claim, a card and a date at each time."""

import re

import pytest

from gpt2.study import recorded
from gpt2.study.findings import claims, floor, streams, updates
from gpt2.study.tables import published

TIMED = {
    "kernels_by_phase": streams.kernels_by_phase, "lines": lambda: streams.lines("fp32"),
    "copies": streams.copies, "overlap": streams.overlap, "loader": streams.loader,
    "sync_costs": streams.sync_costs, "utilisation": streams.utilisation,
    "products": streams.products, "graphs": streams.graphs, "outside": streams.outside,
    "traffic": updates.traffic, "clipping": updates.clipping, "floor": floor.floor,
    "accumulation": floor.accumulation, "a trace": lambda: streams.of_a_trace("", "fp32"),
}


def test_launches_by_rule_are_those_recorded():
    table = updates.kernels().frame
    assert len(table) == 6 and (table["kernels (by rule)"] == table["kernels (recorded)"]).all()


def test_the_memory_of_updates_is_predicted_to_the_byte():
    table = updates.temporaries().frame
    assert len(table) == 6 and (table["differences (bytes)"] == 0).all()


def test_clipping_takes_what_its_rule_says():
    """A number for each tensor times the pieces of the largest, in blocks of 512, and a block for each norm."""
    sizes = updates.sizes("124M")
    partial = 4 * len(sizes) * -(-max(sizes) // 65_536)
    taken = recorded.one("06-clip", "temporary_bytes", model="124M", way="default")
    assert taken == -(-partial // 512) * 512 + 512 * len(sizes)


def test_every_claim_has_a_finding_and_no_finding_is_without_a_claim():
    rows = published("05-claims")
    assert set(rows["claim"]) == set(claims.FINDINGS)
    assert set(rows["section"]) == {*claims.STREAM, *claims.UPDATE}


@pytest.mark.parametrize("sections", [claims.STREAM, claims.UPDATE])
def test_findings_have_a_verdict_a_number_and_a_place(sections):
    table = claims.shown(sections).frame
    assert set(table["verdict"]) <= {"holds", "in part", "otherwise", "given"}
    assert all(re.match(r"0[1-9]", place) for place in table["where"])
    assert all(re.search(r"\d|on a card", found) for found in table["what we find"])
    assert "nan" not in " ".join(table["what we find"])


@pytest.mark.parametrize("name", TIMED)
def test_a_time_names_its_card_and_its_day(name):
    assert re.search(r"[Rr]ecorded on NVIDIA H200 on 20\d\d-\d\d-\d\d, torch \d", TIMED[name]().caption)


def test_syncs_are_counted_alike_on_a_simulated_card_and_a_real_one():
    real = recorded.table("05-sync-counts").set_index("habit")["sync_count"]
    counted = streams.habits_counted().set_index("habit")["sync_count"]
    for habit in ("plain", "item", "cpu", "logging", "nonzero", "copy", "synchronize"):
        assert counted[habit] == real[habit], habit
    assert real["per layer"] == 12 and counted["per layer"] == 2  # one for each block: 124M and tiny


def test_somebodys_own_trace_is_shown(tmp_path):
    from test_timeline import anybodys_step

    anybodys_step().read(tmp_path)
    shown = streams.of_a_trace(str(tmp_path / "trace.json"), "fp32")
    assert shown.frame["kernels"].sum() == 6 and "NVIDIA" not in shown.caption


def test_the_recording_says_that_the_step_by_rule_and_by_profiler_agree():
    """Kernels of the timeline are those of the table of kernels."""
    for name in ("fp32", "bf16-sdpa", "bf16-sdpa-fused"):
        device = recorded.of(f"05-timeline-{name}", lane="device")
        assert len(device) == recorded.of("05-kernels", recipe=name)["kernel_count"].sum()
