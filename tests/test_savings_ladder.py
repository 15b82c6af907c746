"""Savings: each leaves what is learnt as it was, and takes the memory it was predicted to take."""

import json
import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpt2.memory.simulator import SimulatedGpu
from gpt2.step import Recipe, Training
from gpt2.study import results, runs
from gpt2.study.backends import attention_backend
from gpt2.study.experiments import EXPERIMENTS, Experiment, predict
from gpt2.study.paths import ROOT
from gpt2.study.savings import boundaries, compared, limits, timing
from gpt2.study.savings.ladder import LADDER, LENGTHS, LIMIT_MIB, SAVINGS, SINGLES, by_key
from gpt2.study.savings.predict import GPU, RELEASE, at_peak, cast_weights

MiB = 2**20
TINY = Recipe(model="tiny", batch=4, length=16)
EXACT = {
    "sdpa": {"attention": "sdpa"},
    "block": {"checkpoint": "block"},
    "every-2": {"checkpoint": "every-2"},
    "attention": {"checkpoint": "attention"},
    "mlp": {"checkpoint": "mlp"},
    "chunked": {"loss": "chunked", "loss_chunks": 3},
    "accumulate": {"accumulate": 2},  # the same micro-batch twice: the same mean
    "fused": {"optimizer": "fused"},
    "drop-logits": {"keep_logits": False},
    "in-backward": {"step_in_backward": True},
    "all": {"attention": "sdpa", "checkpoint": "block", "loss": "chunked", "optimizer": "fused", "keep_logits": False},
}
ROUNDED = {"bf16": ({"precision": "bf16"}, 2**-6), "moments": ({"moments": "bf16"}, 2**-6)}


# --- what is learnt ---------------------------------------------------------------------------------------------------


def gradients(**options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of the first step on the CPU."""
    training = Training(replace(TINY, **options), device="cpu")
    tokens = training.tokens
    for _ in range(training.recipe.accumulate):
        with training._autocast():
            loss = training.model(tokens[:, :-1], tokens[:, 1:])[1]
        (loss / training.recipe.accumulate).backward()
    return loss.detach(), [parameter.grad for parameter in training.model.parameters()]


def curve(steps: int = 50, **options) -> torch.Tensor:
    training = Training(replace(TINY, **options), device="cpu")
    return torch.stack([training.step(number) for number in range(1, steps + 1)])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def baseline():
    return gradients(), curve()


@pytest.mark.parametrize("name", [name for name in EXACT if name != "in-backward"])
def test_loss_and_gradients_are_those_of_the_baseline(name, baseline):
    (loss, grads), (expected, wanted) = gradients(**EXACT[name]), baseline[0]
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for grad, right in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-6)


def test_gradients_in_bf16_are_off_by_its_rounding_and_no_more(baseline):
    (loss, grads), (expected, wanted) = gradients(precision="bf16"), baseline[0]
    assert abs(loss - expected) < 2**-7 * expected
    for grad, right in zip(grads, wanted, strict=True):
        assert grad.dtype is torch.float32
        assert (grad - right).norm() < 2**-5 * right.norm() + 1e-6


@pytest.mark.parametrize("name", EXACT)
def test_fifty_steps_follow_the_same_curve(name, baseline):
    torch.testing.assert_close(curve(**EXACT[name]), baseline[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ROUNDED)
def test_fifty_steps_of_rounded_numbers_stay_within_the_rounding(name, baseline):
    options, bound = ROUNDED[name]
    followed = curve(**options)
    assert (followed - baseline[1]).abs().max() < bound * baseline[1][0]
    assert baseline[1][-1] < baseline[1][0] - 0.2, "something must have been learnt"


# --- cases ------------------------------------------------------------------------------------------------------------


def test_case_16_checkpointing_bare_layers_saves_nothing():
    kept = {}
    for how in ("plain", "checkpointed"):
        with SimulatedGpu("A40"):
            layers = [torch.nn.Linear(256, 256).cuda() for _ in range(8)]
            x = torch.zeros(137, 256, device="cuda", requires_grad=True)
            layers[0](x)
            start = torch.cuda.memory_allocated()
            h = x
            for layer in layers:
                h = layer(h) if how == "plain" else checkpoint(layer, h, use_reentrant=False)
            kept[how] = torch.cuda.memory_allocated() - start
    assert kept["plain"] == kept["checkpointed"] == 8 * 137 * 256 * 4 == 1_122_304


def test_case_17_with_fused_attention_no_square_is_left_to_recompute():
    found = compared.table("predicted", "07-selective").set_index(["attention", "precision"])
    saved = found["kept_square_bytes"] - found["checkpointed_square_bytes"]
    assert saved["explicit", "fp32"] == 12 * (8 * 12 * 1024**2 * 4 + 1024**2)  # probabilities and a mask per block
    assert saved["sdpa", "fp32"] == saved["sdpa", "bf16"] == 0
    assert found.loc[("sdpa", "fp32"), "kept_square_bytes"] == 0


def test_case_20_a_chunked_loss_saves_down_to_the_next_peak_only():
    """The peak of the loss less the highest that remains; never the logits as such."""
    full, chunked = (predict(Experiment("", Recipe(**options)), GPU, torch_release=RELEASE)
                     for options in ({}, {"loss": "chunked"}))
    ours, theirs = at_peak(full), at_peak(chunked)
    vocabulary_sized = 4 * 8192 * 50_257 * 4
    saved = ours["peak_allocated_bytes"] - theirs["peak_allocated_bytes"]
    assert saved < vocabulary_sized - 900 * MiB
    assert theirs["peak_owner"] == "temporaries" and theirs["peak_module"] == "transformer.h.11.attn"
    small = compared.table("predicted", "07-crossovers").pivot(
        index="tokens_count", columns="key", values="peak_allocated_bytes")
    assert (small["chunked"] - small["base"]).loc[:512].abs().max() < 4 * MiB  # the optimizer sets the peak


def test_case_21_evaluation_logits_are_counted_in_bytes():
    with SimulatedGpu("H200"):
        with torch.no_grad():
            torch.empty(1000, 512, 30_522, device="cuda")
        asked = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert asked == 1000 * 512 * 30_522 * 4
    assert round(asked / 2**30, 1) == 58.2 and round(asked / 4 / 2**30, 2) == 14.55


# --- predictions ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def predicted():
    return compared.table("predicted", "07-savings").set_index("key")


def test_the_ladder_begins_at_the_published_batch_and_never_falls():
    batches = [saving.largest for saving in LADDER]
    assert batches[0] == 20 and batches == sorted(batches)
    assert len({saving.key for saving in SAVINGS}) == len(SAVINGS) >= 15


def test_every_largest_batch_was_predicted_to_fit_and_one_more_not_to(predicted):
    assert list(predicted.index) == [saving.key for saving in SAVINGS]
    assert predicted["largest_batch_count"].tolist() == [saving.largest for saving in SAVINGS]
    assert predicted["largest_fits"].all() and not predicted["next_fits"].any()


@pytest.mark.parametrize("key", ["block", "cudnn", "ladder-5"])
def test_the_boundary_is_where_the_tables_say(key, predicted):
    saving = by_key(key)
    pair = [replace(EXPERIMENTS[saving.at(saving.largest + more)], steps=6) for more in (0, 1)]
    fits, fails = (predict(experiment, GPU, torch_release=RELEASE) for experiment in pair)
    assert fits.meta["out_of_memory"] is None
    assert fails.meta["out_of_memory"]["step"] == predicted.loc[key, "next_fails_step"]
    reserved = max(mark.max_reserved_bytes for mark in fits.marks if mark.step == 6)
    assert reserved == predicted.loc[key, "largest_step_6_reserved_bytes"] <= LIMIT_MIB * MiB


@pytest.mark.parametrize("key", ["base", "moments", "ladder-11"])
def test_the_tables_hold_what_is_predicted_today(key, predicted):
    now = at_peak(predict(EXPERIMENTS[by_key(key).name], GPU, torch_release=RELEASE))
    for name, value in now.items():
        assert value == predicted.loc[key, name], name


def test_a_waterfall_starts_at_the_published_peak():
    steps = compared.waterfall()
    assert round(steps["peak_bytes"].iloc[0] / MiB) == 17_054
    assert steps["peak_bytes"].is_monotonic_decreasing


def test_states_matter_in_small_steps_and_activations_in_large_ones():
    wide = compared.table("predicted", "07-crossovers").pivot(
        index="tokens_count", columns="key", values="peak_allocated_bytes")
    saved = 1 - wide.div(wide["base"], axis=0)
    for_activations, for_states = ["bf16", "block", "chunked"], ["moments", "in-backward"]
    assert saved.loc[128, for_activations].max() < 0.01 and saved.loc[128, for_states].min() > 0.15
    assert saved.loc[8192, for_activations].min() > 0.2 and saved.loc[8192, ["fused", "in-backward"]].max() < 0.01


def test_autocasts_copies_of_weights_are_there_with_and_without_the_cache():
    """Autograd keeps what the cache would keep; only where forward is computed again does the cache hold more."""
    trace = runs.recorded("bf16")
    found = compared.table("predicted", "07-casts").set_index(["configuration", "cache"])
    plain = found.loc["bf16"]
    matrices = 2 * (12 * 12 * 768**2 + 50_257 * 768)
    assert plain["peak_casts_bytes"].nunique() == 1
    assert matrices <= plain["peak_casts_bytes"].iloc[0] < matrices + 49 * MiB  # a block may be 1 MiB larger
    again = found.loc["bf16, every block checkpointed", "most_casts_bytes"]
    assert again[True] > again[False] + 150 * MiB
    assert cast_weights(trace, len(trace) - 1) == []


# --- recordings -------------------------------------------------------------------------------------------------------


def measured(name: str) -> pd.DataFrame:
    path = ROOT / "results" / "measured" / runs.HOME / f"{name}.csv"
    if not path.is_file():
        pytest.skip(f"{name} has not been recorded")
    return results.load_table(path)


def test_peaks_recorded_are_those_predicted(predicted):
    recorded = measured("07-savings").set_index("key")
    columns = ["peak_allocated_bytes", "peak_reserved_bytes"]
    off = recorded[columns] - predicted.loc[recorded.index, columns]
    assert len(recorded) >= 15
    assert off[(off != 0).any(axis=1)].to_dict("index") == {}


def test_recorded_tables_are_made_of_the_recorded_traces():
    table = measured("07-savings").set_index("key")
    for key in ("bf16", "chunked"):
        peak = at_peak(runs.recorded(by_key(key).name))["peak_allocated_bytes"]
        assert peak == table.loc[key, "peak_allocated_bytes"]


def test_every_largest_batch_is_the_one_found_by_running():
    timed = measured("07-steps").set_index("experiment")["fits"].astype(str)
    assert set(timed[[s.at(s.largest) for s in SAVINGS]]) == {"True"}
    assert set(timed[[s.at(s.largest + 1) for s in SAVINGS]]) == {"False"}


def test_peaks_at_the_largest_batch_are_those_predicted_for_that_step():
    for saving in SAVINGS:
        row = boundaries.largest([saving]).frame.iloc[0]
        for what in ("allocated", "reserved"):
            assert row[f"recorded less predicted, {what} (bytes)"] == 0, (saving.key, what)


@pytest.mark.parametrize("table", [lambda: boundaries.one_more(SAVINGS), boundaries.beyond])
def test_batches_fail_as_predicted(table):
    """Also those that survive two steps, or nineteen: the step, the request, the peaks of that step."""
    measured("07-steps")
    found = table().frame
    assert found["recorded"].tolist() == found["fails in step, predicted"].tolist()
    assert found["asks for, recorded (GiB)"].tolist() == found["asks for, predicted (GiB)"].tolist()
    for what in ("allocated", "reserved"):
        assert (found[f"recorded less predicted, {what} (bytes)"] == 0).all()


def test_what_is_confirmed_is_counted():
    measured("07-steps")
    said = boundaries.confirmed()
    assert "28 of 28 are where" in said and "38 of 38 in the predicted step (1, 2, 3, 6, 8, 16 or 20), 38 with" in said


def test_of_two_timed_runs_the_shorter_step_counts_and_of_others_the_last(tmp_path):
    def row(name, **found):
        return {"experiment": name, "batch_count": 8, **found}

    for folder, rows in (
        ("old", [row("sweep-8", least_ms=2.0), row("fused", least_ms=1.0), row("sdpa", least_ms=1.0)]),
        ("new", [row("sweep-8", least_ms=1.0), row("fused", least_ms=2.0), row("sdpa", failed_step=20)]),
    ):
        (tmp_path / folder / "rows").mkdir(parents=True)
        for found in rows:
            (tmp_path / folder / "rows" / f"{found['experiment']}.json").write_text(json.dumps(found))
    timing.collect(tmp_path / "new", [tmp_path / "old"])
    steps = pd.read_csv(tmp_path / "new" / "steps.csv").set_index("experiment")
    assert steps.loc[["sweep-8", "fused"], "least_ms"].tolist() == [1.0, 1.0]
    assert pd.isna(steps.loc["sdpa", "least_ms"]) and steps.loc["sdpa", "failed_step"] == 20


def test_recorded_lengths_are_those_predicted():
    recorded = measured("07-lengths").set_index("key")
    ours = compared.table("predicted", "07-lengths").set_index("key")
    assert recorded["longest_fits"].all() and not recorded["next_fits"].any()
    assert set(recorded.index) == set(LENGTHS)
    for column in ("peak_allocated_bytes", "peak_reserved_bytes", "next_fails_step"):
        assert (recorded[column] == ours.loc[recorded.index, column]).all(), column
    asked = -(-ours.loc[recorded.index, "next_request_bytes"] // 512) * 512  # a recording knows the rounded request
    assert (recorded["next_request_bytes"] == asked).all()


def test_a_chunked_loss_takes_at_most_thirty_percent_longer():
    loss = measured("07-loss").set_index(["precision", "vocabulary_count", "loss"])["loss_ms"]
    for precision in ("fp32", "bf16"):
        assert loss[precision, 50_257, "8 chunks"] <= 1.3 * loss[precision, 50_257, "plain"]
    assert limits.liger_step().frame.set_index("loss").loc["8 chunks"].iloc[:, -2].max() <= 1.3


def test_ligers_loss_takes_what_64_chunks_take():
    peak = measured("07-loss").set_index(["precision", "vocabulary_count", "loss"])["peak_bytes"]
    ours, theirs = peak["fp32", 50_257, "64 chunks"], peak["fp32", 50_257, "liger"]
    assert theirs == pytest.approx(ours, rel=0.002)


def test_case_19_on_the_card():
    """N = 1,024, V = 5,000, C = 64: chunks of hidden states peak at 0.82, 0.45 and 0.26 of the logits."""
    loss = measured("07-loss").set_index(["precision", "vocabulary_count", "loss"])
    for chunks, share in ((4, 0.82), (8, 0.45), (16, 0.26)):
        peak = loss.loc[("fp32", 5000, f"{chunks} chunks"), "peak_bytes"]
        assert peak / (1024 * 5000 * 4) == pytest.approx(share, abs=0.015)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_unknown_names_are_one_clear_line():
    with pytest.raises(ValueError, match="^unknown saving 'magic'; known: base, expandable, "):
        by_key("magic")
    with pytest.raises(ValueError, match="^attention backend 'magic' is not one of: cudnn, flash, efficient, math$"):
        attention_backend("magic")


def test_a_backend_is_obeyed():
    q = torch.randn(1, 2, 8, 16)
    with attention_backend("math"):
        assert not torch.backends.cuda.flash_sdp_enabled()
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.backends.cuda.flash_sdp_enabled()
    scores = (q @ q.transpose(-2, -1) / math.sqrt(16)).masked_fill(torch.ones(8, 8).tril() == 0, float("-inf"))
    torch.testing.assert_close(out, scores.softmax(-1) @ q, rtol=1e-5, atol=1e-6)


def test_tables_for_readers_have_a_row_for_each_saving():
    assert len(compared.new_peaks(SINGLES).frame) == len(SINGLES)
    assert limits.crossovers().frame["is in"].tolist() == ["optimizer"] * 3 + ["backward"] * 4
