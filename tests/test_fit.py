"""The largest batch that fits: what a few steps promise and twenty do not keep."""

import json

import pytest

from gpt2.cli import main
from gpt2.memory import gpus
from gpt2.memory.fit import STEPS, Trial, search
from gpt2.step import Recipe
from gpt2.study import fit
from gpt2.study.experiments import A40_FREE_MIB, EXPANDABLE, Experiment

H200 = ("--gpu", "H200", "--torch", "2.11.0", "--limit-mib", str(A40_FREE_MIB))
CREEPS = (*H200, "--drop-logits", "--alloc-conf", EXPANDABLE)  # 25 ran out in step 6 on an H200


def ask(capsys, *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_batch_that_dies_in_step_6_is_not_the_answer(capsys):
    found = ask(capsys, "fit", *CREEPS, "--batch", "24")
    assert found["largest_batch"] == 24
    tried = {row["batch"]: row for row in found["tried"]}
    assert (tried[24]["fits"], tried[24]["steps"]) == (True, STEPS)
    assert (tried[25]["fits"], tried[25]["steps"]) == (False, STEPS)
    assert (found["next"]["batch"], found["next"]["step"], found["next"]["phase"]) == (25, 6, "backward")


def test_steps_that_were_asked_for_are_those_that_count(capsys):
    found = ask(capsys, "fit", *CREEPS, "--batch", "25", "--steps", "3")
    assert found["largest_batch"] == 25 and {row["steps"] for row in found["tried"]} == {3}
    found = ask(capsys, "fit", *CREEPS, "--batch", "25", "--steps", "6")
    assert found["largest_batch"] == 24 and found["next"]["step"] == 6


def test_predict_shows_it_and_says_when_it_looked_too_briefly(capsys):
    assert main(["predict", *CREEPS, "--batch", "25", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"]
    assert err.count("\n") == 1 and f"--steps {STEPS} tells" in err
    assert main(["predict", *CREEPS, "--batch", "25", "--json", "--steps", str(STEPS)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["out_of_memory"]["step"] == 6 and err == ""


def test_a_length_is_confirmed_as_a_batch_is(capsys):
    found = ask(capsys, "fit", "--what", "length", "--gpu", "A40", "--model", "tiny", "--batch", "2", "--length", "512",
                "--context", "512", "--limit-mib", "30", "--alloc-conf", EXPANDABLE)
    tried = {row["length"]: row for row in found["tried"]}
    best = found["largest_length"]
    assert tried[best]["fits"] and tried[best]["steps"] == STEPS and not tried[best + 1]["fits"]


@pytest.mark.parametrize(("conf", "steps", "enough"), [
    ("", 3, 3), ("", 30, 30), (EXPANDABLE, 3, STEPS), (EXPANDABLE, 30, 30), ("expandable_segments:False", 3, 3),
    ("max_split_size_mb:128", 3, 3)])
def test_steps_that_are_enough(conf, steps, enough):
    assert fit.enough_steps(Experiment("", Recipe(), steps=steps, alloc_conf=conf)) == enough


def test_native_segments_are_not_confirmed_and_need_not_be():
    """In every step from the fourth on, a run at the native boundary does what it did in the third."""
    found = fit.largest(Experiment("", Recipe()), gpus.find("A40"), torch_release="2.5.1")
    assert found.largest == 20 and {trial.steps for trial in found.tried} == {3}
    trace = fit.predict(Experiment("", Recipe(batch=20), steps=6), "A40", torch_release="2.5.1")
    steps = {n: [event._replace(step=0) for event in trace.events if event.step == n] for n in (3, 4, 5)}
    assert steps[3] == steps[4] == steps[5]


@pytest.mark.parametrize("dies_from", [50, 49, 45, 20, 2, 1])
@pytest.mark.parametrize("most", [50, 60])
def test_search_steps_down_to_what_was_confirmed(dies_from, most):
    """Beyond 50 nothing fits for long enough to be seen; from `dies_from` on the longer run fails."""
    longer: list[int] = []

    def attempt(number: int) -> Trial:
        return Trial(number, number <= 50, 100 * number, 100 * number, steps=3)

    def confirm(number: int) -> Trial:
        longer.append(number)
        return Trial(number, number < dies_from, 100 * number, 100 * number, steps=20)

    found = search(attempt, 5_000, first=8, most=most, confirm=confirm)
    tried = {trial.number: trial for trial in found.tried}
    assert found.largest == dies_from - 1
    assert found.largest == 0 or (tried[found.largest].fits and tried[found.largest].steps == 20)
    assert found.next.number == dies_from and not found.next.fits and found.next.steps == 20
    assert longer[0] == 50 and len(longer) <= 13


def test_what_fits_for_good_is_confirmed_once():
    longer: list[int] = []

    def attempt(number: int) -> Trial:
        longer.append(number)
        return Trial(number, number <= 50, 100 * number, 100 * number)

    before = len(search(attempt, 5_000, first=8, most=60).tried)
    longer.clear()
    found = search(attempt, 5_000, first=8, most=60, confirm=attempt)
    assert found.largest == 50 and len(longer) == before + 1


def test_a_card_that_is_full_long_before_it_fails_does_not_send_the_search_far():
    """With expandable segments the card looks full from 160 on, and 170 still fits: each estimate is one more."""
    def attempt(number: int) -> Trial:
        size = min(100 * number, 16_000 + number)
        return Trial(number, number <= 170, size, size)

    found = search(attempt, 16_300, first=8, most=65_536)
    assert found.largest == 170 and found.next.number == 171
    assert max(trial.number for trial in found.tried) < 400 and len(found.tried) <= 16
