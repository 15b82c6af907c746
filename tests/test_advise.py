"""What makes a step fit: every saving with its price, the cheapest first, and nothing that dies later."""

from dataclasses import replace

import pytest

from gpt2.memory import gpus
from gpt2.memory.fit import STEPS
from gpt2.step import Recipe
from gpt2.study import advise, recorded
from gpt2.study.experiments import A40_FREE_MIB, EXPANDABLE, Experiment, predict
from gpt2.study.savings import prices

A40, H200 = gpus.find("A40"), gpus.find("H200")


def changes(gpu=A40, **recipe) -> dict[str, prices.Change]:
    found = advise._applicable(Experiment("", Recipe(**recipe)), gpu)
    return {change.option: change for change in found}


def test_every_saving_is_considered_and_has_a_price():
    found = changes()
    assert {"--checkpoint every-2", "--checkpoint every-3", "--checkpoint attention", "--checkpoint mlp",
            "--checkpoint block", "--moments bf16", "--step-in-backward", "--loss chunked --loss-chunks 64",
            "--precision bf16", "--batch 4 --accumulate 2", f"--alloc-conf {EXPANDABLE}"} <= set(found)
    assert all(change.price and change.weight >= prices.EFFORT for change in found.values())


def test_times_are_those_of_the_table():
    steps = recorded.table("07-steps").set_index("experiment")["step_ms"]
    found = changes()
    for option, experiment in {"--attention sdpa": "sdpa", "--checkpoint every-2": "save-every-2",
                               "--moments bf16": "save-moments", "--step-in-backward": "save-in-backward"}.items():
        assert found[option].time_ratio == pytest.approx(steps[experiment] / steps["sweep-8"])
    assert found["--attention sdpa"].price == "17 % less time"
    assert found["--checkpoint every-3"].price.startswith("not timed")
    assert "second moment" in found["--moments bf16"].price and "no clipping" in found["--step-in-backward"].price
    one, two = found["--checkpoint block"], found["--moments bf16"]
    assert prices.of((one,)) == "24 % more time, measured on NVIDIA H200"
    assert prices.of((one, two)).startswith("--checkpoint block: 24 % more time; --moments bf16: ")
    assert "measured" not in prices.of((found["--checkpoint every-3"],))


def test_cheap_changes_come_before_dear_ones():
    weight = {option: change.weight for option, change in changes().items()}
    order = ["--attention sdpa", "--loss chunked", "--checkpoint mlp", "--checkpoint every-2", "--checkpoint attention",
             "--checkpoint block", "--moments bf16"]
    assert sorted(order, key=weight.get) == order
    assert weight["--loss chunked --loss-chunks 64"] > weight["--loss chunked"]


@pytest.mark.parametrize(("recipe", "gone"), [
    ({"checkpoint": "block"}, "--checkpoint every-2"), ({"loss": "chunked"}, "--drop-logits"),
    ({"loss": "chunked", "loss_chunks": 64}, "--loss chunked --loss-chunks 64"),
    ({"batch": 1, "length": 32}, "--loss chunked --loss-chunks 64"), ({"precision": "fp16"}, "--precision bf16"),
    ({"clip": 1.0}, "--step-in-backward"), ({"batch": 1}, "--batch 4 --accumulate 2"),
    ({"step_in_backward": True}, "--batch 4 --accumulate 2"), ({"moments": "bf16"}, "--moments bf16")])
def test_what_changes_nothing_is_left_out(recipe, gone):
    assert gone not in changes(**recipe)


def test_an_old_card_is_not_told_to_use_bf16():
    assert "--precision fp16" in changes(gpus.find("T4")) and "--precision bf16" not in changes(gpus.find("T4"))


@pytest.mark.parametrize("options", [
    ("--checkpoint block", "--checkpoint mlp"), ("--loss chunked", "--loss chunked --loss-chunks 64"),
    ("--loss chunked", "--drop-logits"), ("--step-in-backward", "--batch 4 --accumulate 2")])
def test_what_does_not_go_together(options):
    found = changes()
    assert not advise._together(Experiment("", Recipe()), tuple(found[option] for option in options))


@pytest.mark.parametrize("options", [
    (), ("--loss chunked",), ("--checkpoint block", "--loss chunked"), ("--checkpoint every-2",),
    ("--moments bf16", "--attention sdpa"), ("--batch 2 --accumulate 4",)])
def test_an_estimate_is_near_and_hardly_ever_above(options):
    """What is estimated not to fit does not; a small surplus costs a trial."""
    experiment = Experiment("", Recipe())
    trial = advise._Trial(experiment, H200, "2.11.0", print)
    chosen = tuple(changes()[option] for option in options)
    exact = trial.on_any_card(chosen)["peak_allocated_bytes"]
    assert 0.93 * exact <= trial.promises(chosen) <= exact * advise._NEAR


def test_batch_21_of_the_a40():
    said: list[str] = []
    found = advise.advise(Experiment("", Recipe(batch=21)), A40, "2.5.1", tell=said.append)
    assert [row["changes"] for row in found] == [f"--alloc-conf {EXPANDABLE}", "--attention sdpa", "--drop-logits"]
    assert all(row["fits"] and row["peak_reserved_bytes"] <= A40.free_bytes_at_start for row in found)
    assert all("measured on NVIDIA H200" in row["price"] for row in found)
    assert "does not fit: --optimizer fused" in said


def test_expandable_segments_that_last_five_steps_are_no_advice():
    """Batch 25 without logits runs out in step 6 with expandable segments, as it did on an H200."""
    experiment = Experiment("", Recipe(batch=25, keep_logits=False), limit_mib=A40_FREE_MIB)
    assert predict(replace(experiment, steps=3, alloc_conf=EXPANDABLE), H200, torch_release="2.11.0").meta[
        "out_of_memory"] is None
    found = advise.advise(experiment, H200, "2.11.0", wanted=2)
    assert found and all(row["fits"] and row["changes"] != f"--alloc-conf {EXPANDABLE}" for row in found)


def test_where_three_are_not_enough_it_is_everything_that_is_needed(monkeypatch):
    monkeypatch.setattr(advise, "MOST_WORK", 300)
    experiment = Experiment("", Recipe(batch=1, length=1024), limit_mib=1_700)
    found = advise.advise(experiment, A40)
    assert len(found) == 1 and found[0]["fits"] and found[0]["peak_reserved_bytes"] <= 1_700 * 2**20
    assert found[0]["changes"].count("--") > 3 and "--loss chunked" in found[0]["changes"]


def test_where_nothing_helps_it_says_how_much_it_would_take():
    found = advise.advise(Experiment("", Recipe(batch=1), limit_mib=600), A40)
    assert len(found) == 1 and not found[0]["fits"]
    assert found[0]["peak_allocated_bytes"] > 600 * 2**20 and "--moments bf16" in found[0]["changes"]


def test_a_fit_that_needs_confirming_is_confirmed():
    trial = advise._Trial(Experiment("", Recipe()), A40, "2.5.1", print)
    assert trial._long_enough(Experiment("", Recipe(), alloc_conf=EXPANDABLE)).steps == STEPS
    assert trial._long_enough(Experiment("", Recipe())).steps == advise.FEW_STEPS
