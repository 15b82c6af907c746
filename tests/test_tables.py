"""The tables of notebooks 01 to 04: against what is published, against the recordings, and against themselves."""

from dataclasses import replace

import pandas as pd
import pytest

from gpt2.memory.diff import compare
from gpt2.step import Recipe
from gpt2.study import hooks, measured, results, runs, tables
from gpt2.study.experiments import EXPERIMENTS
from gpt2.study.findings import activations, capacity, lines, peak, questions
from gpt2.study.paths import ROOT

MIB = 2**20
TRACES = ROOT / "results" / "measured" / "h200" / "traces"


@pytest.fixture(scope="module")
def here():
    """The baseline: A40 with hooks and stacks, and the recording with its prediction."""
    return runs.beside(Recipe(), gpu="A40", torch_release="2.5.1", hooks=True)


def a40(batch):
    return runs.predicted(capacity.experiment(batch), "A40", "2.5.1")


@pytest.fixture(scope="module")
def failing():
    return a40(21)


# --- 01 ---------------------------------------------------------------------------------------------------------------


def test_lines_of_the_loop_are_the_published_ones(here):
    rows = lines.lines(here.predicted).set_index("line")["change_bytes"] / MIB
    for line, change in tables.published("01-line-by-line").set_index("line")["change_mib"].items():
        assert rows[line] == pytest.approx(change, abs=0.051), line


def test_a_recording_has_the_lines_of_its_prediction(here):
    pd.testing.assert_frame_equal(lines.lines(here.recorded), lines.lines(here.twin))


def test_sixteen_bytes_are_counted_in_the_trace(here):
    for trace in here.traces():
        rows = lines.states(trace).set_index("what")
        assert list(rows["bytes_per_parameter"]) == [4, 4, 4, 4, 16]
        assert round(rows.loc["total", "size_bytes"] / MIB, 1) == 1898.8


def test_the_first_step_lacks_adam_a_workspace_and_some_slack(here):
    rows = lines.peaks(here.predicted).set_index("owner")["change_bytes"]
    assert round(rows["total"] / MIB) == tables.number("step_1_below_step_2") == 959
    assert rows["optimizer state"] == 2 * 4 * 124_439_808
    assert rows["library workspace"] == 8_519_680
    assert rows[["parameters", "activations", "loss", "residual"]].eq(0).all()


def test_real_values_on_the_cpu():
    answers = list(lines.tied_head("tiny").frame["answer"])
    assert answers[:2] == ["True", "True"] and answers[2] < answers[3]
    losses = lines.first_loss("tiny", batch=8, length=16).frame["loss (nats)"]
    assert losses[0] == pytest.approx(4.615, abs=0.001) and losses[1] == pytest.approx(losses[0], abs=0.1)


# --- 02 ---------------------------------------------------------------------------------------------------------------


def test_one_block_keeps_sixteen_tensors_of_the_published_rows(here):
    kept = activations.block_saved(Recipe(), "A40", "2.5.1")
    assert len(kept) == 16 and kept["saved_bytes"].sum() / MIB == 769.125
    sums = kept.groupby("published_row")["saved_bytes"].sum() / MIB
    for row, size in tables.published("02-block-saved").set_index("tensor")["size_mib"].drop("total").items():
        assert sums[row] == size


def test_blocks_and_ends_make_the_measured_activations(here):
    for trace in here.traces():
        rows = activations.activations(trace).set_index("part")["size_bytes"]
        assert rows["largest block"] == rows["smallest block"] == 769.125 * MIB
        assert round(rows["activations"] / MIB) == 9278


def test_fifty_five_readings_that_change_nothing(here):
    marks = hooks.of_step(here.predicted)
    assert len(marks) == hooks.PER_STEP == 55
    assert max(mark.allocated_bytes for mark in marks) / MIB == pytest.approx(13_913, abs=0.5)
    without = runs.predicted(EXPERIMENTS["plain"], "A40", "2.5.1")
    assert compare(here.predicted, without).index is None
    assert peak.highest(here.predicted) == peak.highest(without)
    names = [mark.name for mark in marks]
    assert names[:2] == ["start", "before block 1, forward"] and names[27] == "before block 12, backward"


def test_the_hooks_are_gone_afterwards():
    from gpt2.memory.simulator import SimulatedGpu
    from gpt2.step import Training

    with SimulatedGpu("A40", torch="2.5.1") as card:
        training = Training(Recipe(model="tiny", batch=2, length=8), watch=card.watch)
        with pytest.raises(ZeroDivisionError), hooks.readings(training.model, card, 1):
            training.step(1)
            raise ZeroDivisionError
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in training.model.modules())
        count = len(card.marks)
        training.step(2)
        assert len(card.marks) == count + 5


def test_the_rule_of_34_bytes_holds_where_all_is_in_bf16():
    rows = activations.sixteen_bits(Recipe()).set_index("block")["bytes_per_sbh"]
    assert rows["all in bf16, dropout 0.1"] == pytest.approx(34, abs=0.1)
    assert rows["bf16 autocast, dropout 0.1"] == pytest.approx(34 + 4 + 2.25, abs=0.1)


def test_a_block_grows_with_the_length_and_its_square():
    rows = activations.growth((256, 512, 1024), "A40", "2.5.1")
    for _, kind in rows.groupby("kind"):
        linear, square = (kind.set_index("length")[name] for name in ("linear_bytes", "square_bytes"))
        assert linear[1024] == 4 * linear[256] and square[1024] == 16 * square[256]
    assert set(rows["kind"]) == {"predicted", "measured"}


# --- 03 ---------------------------------------------------------------------------------------------------------------


def test_the_peak_as_published(here):
    rows = peak.groups(here.predicted).set_index("owner")
    for owner, size, share in tables.published("03-peak").itertuples(index=False):
        assert rows.loc[owner, "size_bytes"] / MIB == pytest.approx(size, abs=0.5)
        assert pd.isna(share) or rows.loc[owner, "share_ratio"] == pytest.approx(share, abs=0.005)


def test_four_tensors_and_the_request_that_set_the_peak(here):
    for trace in here.traces():
        assert list(peak.vocabulary_sized(trace)["size_bytes"]) == [1_646_821_376] * 4
        facts = peak.request(trace).set_index("fact")["value"]
        assert facts["operator"] == "aten._log_softmax_backward_data" and facts["phase"] == "backward"
        assert facts["asked for"].iloc[0] == "1,646,821,376"
    assert peak.request(here.predicted).iloc[6]["value"] == "615"  # published: just after 600


def test_nothing_is_left_over(here):
    for trace in here.traces():
        assert (peak.residuals(trace)["largest_residual_bytes"] == 0).all()


def test_two_workspaces_of_two_threads(here):
    rows = questions.workspaces(here.predicted)
    assert list(rows["size_bytes"]) == [8_519_680] * 2
    assert list(rows["thread"]) == ["main", "autograd engine's"] and list(rows["phase"]) == ["warmup", "backward"]
    assert list(questions.workspaces(here.recorded)["size_bytes"]) == [33_554_432, 1_048_576, 33_554_432]


def test_slack_by_block_is_the_published_sum(here):
    rows = questions.slack(here.predicted)
    assert round(rows["slack_bytes"].sum() / MIB, 1) == 5.8
    assert rows.iloc[0]["tensor"] == "transformer.wte.weight"
    assert questions.slack(here.recorded)["slack_bytes"].tolist() == questions.slack(here.twin)["slack_bytes"].tolist()


def test_the_spike_is_explained_to_the_byte(here):
    rows = questions.spikes(here.predicted)
    assert len(rows) == 12 and rows["spike_bytes"].nunique() == 1
    assert rows["spike_bytes"][0] / MIB == 624.9375
    parts = questions.spike(here.predicted)
    assert parts["change_bytes"].sum() == rows["spike_bytes"][0]
    assert parts["line"][0].split(": ")[1].startswith("score = ")
    assert parts["line"][1].split(": ")[1].startswith("masked_score = ")
    assert list(parts["change_bytes"][:2]) == [384 * MIB] * 2
    assert (questions.spikes(here.recorded)["spike_bytes"] == 624.9375 * MIB - MIB).all()  # cuBLASLt's MiB stays


def test_gradients_arrive_by_block_and_late(here):
    for trace in here.traces():
        rows = questions.gradients(trace).set_index("arrives")["size_bytes"]
        assert set(rows[[f"block {n}" for n in range(1, 13)]]) == {7_087_872 * 4}
        assert round(rows["embeddings"] / MIB, 2) == 150.24 and rows.index[-1] == "embeddings"
        half, other, total = questions.tied_gradient(trace).itertuples(index=False)
        assert half.from_event < other.from_event < total.from_event < half.to_event < total.to_event


def test_before_the_first_block(here):
    rows = questions.before_block_1(here.predicted)
    assert round(rows["size_bytes"].sum() / MIB) == 51
    assert list(rows["dies"]) == ["backward", "forward", "forward", "backward"]


def test_c_x_is_not_what_stays(here):
    rows = questions.query_key_value(here.predicted).set_index("tensor")
    assert rows.loc["c_x", "dies"] == "forward, in block 1" and rows.loc["c_x", "size_bytes"] == 72 * MIB
    copies = rows.loc[["q in one piece", "k in one piece", "v in one piece"]]
    assert copies["size_bytes"].sum() == 72 * MIB and set(copies["dies"]) == {"backward"}


def test_a_name_holds_the_logits(here):
    dropped = runs.recorded("drop-logits")
    for one, two in zip(questions.logits_name(here.recorded)["size_bytes"],
                        questions.logits_name(dropped)["size_bytes"], strict=True):
        assert one - two == pytest.approx(1_646_821_376, abs=MIB)


# --- 04 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [8, 16, 18, 20])
def test_published_peaks_of_the_a40(batch):
    run = capacity.sweep([a40(batch)]).iloc[0]
    article = tables.published("04-batch-sweep").set_index("batch").loc[batch]
    assert run["fits"] and round(run["peak_allocated_bytes"] / MIB) == article["peak_allocated_mib"]
    if batch > 8:
        assert run["peak_reserved_bytes"] / MIB == article["peak_reserved_mib"]


def test_batch_21_fails_as_published(failing):
    run = capacity.sweep([failing]).iloc[0]
    assert not run["fits"] and run["failed_step"] == 2
    assert round(run["asked_bytes"] / MIB, 1) == 4122.6


def test_the_holes_at_the_failing_request(failing):
    rows = capacity.account(failing).set_index("part")["size_bytes"]
    assert rows[["live blocks", "free, in holes", "left on the card"]].sum() == 45_440 * MIB
    assert rows["largest hole"] < rows["asked for"] and rows["left on the card"] < rows["asked for"]
    assert rows["free, in holes"] + rows["left on the card"] > rows["asked for"]
    assert rows["short of a new segment by"] == 660 * MIB


def test_with_expandable_segments_the_same_request_finds_a_hole():
    trace = runs.predicted(capacity.experiment(21, expandable=True), "A40", "2.5.1")
    rows = capacity.account(trace).set_index("part")["size_bytes"]
    assert rows["largest hole"] >= rows["asked for"] and rows["short of a new segment by"] == 0


def test_one_name_fewer_is_one_tensor_less_reserved():
    kept = a40(16)
    rebound = runs.predicted(replace(capacity.experiment(16), variant="one name"), "A40", "2.5.1")
    assert peak.highest(kept)[1] - peak.highest(rebound)[1] == 16 * 1024 * 768 * 4


def test_the_straight_line_promises_22():
    fixed, each = capacity.line(a40(8))
    assert round(fixed / MIB) == 1494 and round(each / MIB) == 1945
    assert (capacity.FREE - fixed) / each == pytest.approx(22.6, abs=0.05)


# --- files ------------------------------------------------------------------------------------------------------------


def test_measured_tables_are_those_of_the_committed_traces(study_out):
    written = measured.write(TRACES)
    assert len(written) >= 18
    for name in written:
        again, kept = (results.load_table(base / f"measured/h200/{name}.csv") for base in (
            study_out / "results", ROOT / "results"))
        pd.testing.assert_frame_equal(again, kept)
        for fact in ("gpu", "driver", "cuda", "torch", "date", "free_bytes", "config"):
            assert again.attrs[fact] == kept.attrs[fact]


def test_a_table_is_shown_with_its_kinds_and_units(here):
    shown = lines.line_by_line(here)
    bundle = shown._repr_mimebundle_()
    assert "published A40 (MiB)" in bundle["text/html"] and "without a GPU" in bundle["text/plain"]
    assert list(shown.frame["recorded less predicted (bytes)"].unique()) == [0]
    assert "NVIDIA H200" in shown.caption and "driver" in shown.caption


def test_the_readings_of_a_real_gpu_are_predicted_to_the_byte(here):
    seen = runs.recorded_readings(here)
    assert len(hooks.of_step(seen.recorded)) == 55
    pd.testing.assert_frame_equal(activations.readings(seen.recorded)[["name", "allocated_bytes"]],
                                  activations.readings(seen.twin)[["name", "allocated_bytes"]])


def test_a_real_gpu_does_the_same_with_and_without_the_instrument():
    plain, looked, base = (runs.recorded(name) for name in ("plain", "readings", "base"))
    assert compare(plain, looked).index is None and compare(plain, base).index is None
    assert peak.highest(plain) == peak.highest(looked) == peak.highest(base)
