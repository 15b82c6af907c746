"""Failures reproduced: what each keeps, takes or says, to the byte."""

import pytest

from gpt2.memory.explain import explain
from gpt2.memory.reading.layout import fragmentation as fragmentation_at
from gpt2.step import Recipe
from gpt2.study import figures
from gpt2.study.findings import bugs, failures, growth
from gpt2.study.findings.failures import EXPANDABLE, MIB

CARD = {"gpu": "A40", "torch_release": "2.5.1"}
FIRST = Recipe(batch=2, length=128)


# --- out of memory in a step -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first_update():
    return failures.repairs(FIRST, failures.FIRST_UPDATE, room_mib=2400, **CARD).frame.set_index("run")


def test_the_first_update_runs_out_after_a_forward_and_a_backward_that_fitted():
    found = failures.step(FIRST, room_mib=2400, **CARD)
    assert (found.failure["step"], found.failure["phase"]) == (1, "optimizer")
    assert found.message.startswith("CUDA out of memory. Tried to allocate 20.00 MiB")
    phases = [m.name for m in found.trace.marks]
    assert "forward" in phases and "backward" in phases


def test_a_smaller_batch_does_not_repair_the_first_update_smaller_state_does(first_update):
    assert first_update["fits"].to_dict() == {
        "as it is": False, "half the batch": False, "fused": False, "moments in bf16": True,
        "update inside backward": True}
    assert first_update.loc["fused", "fails in"].startswith("step 2, backward")


def test_a_dry_update_fails_before_the_first_batch():
    table = failures.state_first(FIRST, room_mib=2400, **CARD).frame
    assert [text.split(":")[0] for text in table["fails in"]] == ["step 1, optimizer", "step 0, dry update"]


def test_at_the_loss_a_chunked_loss_repairs_and_an_optimizer_does_not():
    table = failures.repairs(Recipe(), failures.AT_THE_LOSS, room_mib=15_000, **CARD).frame.set_index("run")
    assert table["fits"].to_dict() == {
        "as it is": False, "fused optimizer": False, "del logits": False, "chunked loss": True, "half the batch": True}
    found = failures.step(Recipe(), room_mib=15_000, **CARD)
    assert found.failure["requested_bytes"] == 1_646_821_376
    read = explain(found.message, batch=8)
    assert read.cause == "size" and read.blocks_done == 12 and read.candidates[0].kind == "loss"


# --- growth ----------------------------------------------------------------------------------------------------------


def test_what_each_habit_adds_per_step():
    table = growth.growth(**CARD)
    last = table[table["step"] == growth.STEPS].set_index("habit")["growth_bytes"].to_dict()
    graph = 9 * growth.OUT_BYTES  # two hidden tensors of four outputs each, and the output
    assert last == {
        "total + loss, after backward": 0, "total + loss, no backward": graph, "append(loss), no backward": graph + 512,
        "append(loss), after backward": 512, "append(loss.item())": 0, "total + loss, no_grad": 0,
        "append(outputs), no_grad": growth.OUT_BYTES}
    assert len(set(table[table["habit"] == "total + loss, no backward"]["growth_bytes"][1:])) == 1, "every step alike"


def test_an_output_held_over_raises_the_next_peak_by_just_its_bytes():
    first, second, third = growth.held_over(delete=False, **CARD)
    assert (second - first, third - second) == (growth.OUT_BYTES, 0)
    first, second, third = growth.held_over(delete=True, **CARD)
    assert first == second == third


def test_hooks_keep_what_they_store():
    assert growth.kept_by_hooks("outputs", **CARD) == 9 * growth.OUT_BYTES
    assert growth.kept_by_hooks("numbers", **CARD) == 0


def test_hooks_are_taken_away_in_any_case():
    from torch import nn

    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(KeyError), growth.hooked(net, lambda *args: None):
        raise KeyError
    assert not net[0]._forward_hooks


def test_a_caught_error_keeps_the_locals_of_where_it_was_raised():
    found, read = growth.caught(**CARD)
    assert [size for _, size in read] == [500 * MIB, 500 * MIB, 0]
    assert found.message == "" and [e.action for e in found.trace.events].count("oom") == 1


# --- fragmentation --------------------------------------------------------------------------------------------------


def test_the_order_of_lengths_changes_what_is_reserved_and_not_what_is_allocated_in_the_end():
    table = failures.fragmentation(Recipe(batch=2), **CARD)
    reserved = table.groupby("configuration")["reserved_bytes"].max()
    assert reserved["as they come"] > 1.15 * reserved["longest first"]
    assert reserved["expandable segments"] < reserved["as they come"]
    assert reserved["padded to 2 lengths"] < reserved["as they come"]
    ends = table[table["configuration"].isin(["as they come", "longest first"])]
    ends = ends.pivot(index="length", columns="configuration", values="end_bytes")
    assert (ends["as they come"] == ends["longest first"]).all()


def test_recorded_lengths_show_the_same():
    rows = failures.recorded_lengths().groupby("configuration")[["allocated_bytes", "reserved_bytes"]].max()
    native, expandable = rows.loc["native"], rows.loc["expandable segments"]
    assert native["reserved_bytes"] == 13_090_422_784 and expandable["reserved_bytes"] == 9_636_413_440
    assert abs(native["allocated_bytes"] - expandable["allocated_bytes"]) < 20 * MIB


def test_a_piece_that_stays_makes_a_second_segment_necessary():
    found = failures.pinned_segment(room_mib=40_000, **CARD)
    assert found.failure is None
    last = next(m for m in found.trace.marks if m.name == "11 GB again")
    assert last.reserved_bytes == 2 * 10_492 * MIB
    tight = failures.pinned_segment(room_mib=20_000, **CARD)
    index = next(i for i, e in enumerate(tight.trace.events) if e.action == "oom")
    idle = fragmentation_at(tight.trace, index)
    assert idle["idle_bytes"] == idle["largest_free_bytes"] < 11 * 10**9 < idle["idle_bytes"] + 9_508 * MIB
    assert explain(tight.message).cause == "fragmentation"
    assert "expandable_segments" in explain(tight.message).advice[0]
    assert failures.pinned_segment(room_mib=20_000, allocator_conf=EXPANDABLE, **CARD).failure is None


def test_two_settings_that_do_not_go_together():
    ends = {conf: failures.three_sizes(conf, 60)[-1] / MIB for conf in failures.COMBINED}
    both = ends.pop(failures.COMBINED[-1])
    assert both > 5_000 and max(ends.values()) < 500
    read = failures.three_sizes(failures.COMBINED[-1], 40)
    assert all(after - before > 100 * MIB for before, after in zip(read, read[1:], strict=False)), "without end"


# --- five bugs ------------------------------------------------------------------------------------------------------


def test_a_slice_of_the_wrong_dimension_is_noticed_after_a_whole_forward():
    wrong, right = bugs.wrong_dimension(**CARD).frame.to_dict("records")
    assert (wrong["inputs"], wrong["targets"]) == ((8, 513), (7, 513))
    assert wrong["what it says"] == "Expected input batch_size (4104) to match target batch_size (3591)."
    assert wrong["taken by the forward (MiB)"] > 5_000 and right["what it says"] == "nothing"


def test_reshape_copies_where_view_cannot():
    _, view, reshape = bugs.view_or_reshape(**CARD).frame.to_dict("records")
    assert "view size is not compatible" in view["what it says"] and view["takes (bytes)"] == 0
    assert reshape["takes (bytes)"] == 8 * 1024 * 8


def test_initialising_too_early_costs_no_byte_and_the_loss():
    right, wrong = bugs.initialised_too_early().frame.to_dict("records")
    assert right["weights (bytes)"] == wrong["weights (bytes)"]
    assert 10.8 < right["first loss (nats)"] < 11.2 and wrong["first loss (nats)"] > 100


def test_a_view_keeps_its_parent():
    found = bugs.cached(**CARD)
    assert found == {"views of c_x": 864 * MIB, "copies of k and v": 576 * MIB, "not returned": 0}


def test_the_name_logits_keeps_its_tensor():
    found = bugs.logits_held(batch=1, **CARD)
    size = 1 * 1024 * 50_257 * 4
    (release,) = [r for r in found.releases if r.names == ("logits",)]
    assert size <= release.held_bytes < size + MIB
    assert len(bugs.keepers_table(found).frame) == 10
    assert bugs.releases_table(found).frame.iloc[0]["frees (bytes)"] == release.held_bytes


# --- figures ---------------------------------------------------------------------------------------------------------


def test_labels_of_the_growth_figure_do_not_touch():
    figure = figures.growth_by_habit(growth.growth(3, **CARD))
    figure.draw_without_rendering()
    names = [text for text in figure.axes[0].texts if text.get_text() in growth.HABITS]
    boxes = sorted((text.get_window_extent() for text in names), key=lambda box: box.y0)
    assert len(boxes) == len(growth.HABITS)
    assert all(low.y1 <= high.y0 + 2 for low, high in zip(boxes, boxes[1:], strict=False))
