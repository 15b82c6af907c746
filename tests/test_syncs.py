"""How often a step makes the host wait, counted on a simulated GPU; and how a real one's warnings are read."""

import logging
import warnings

import pytest
import torch

from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.values import ValueReadError
from gpt2.step import Recipe, Training
from gpt2.study import syncs
from gpt2.study.timing.sync_costs import read

pytestmark = pytest.mark.filterwarnings("ignore:.*value of a simulated tensor")
RECIPE = Recipe(model="tiny", batch=2, length=16, clip=1.0)


@pytest.fixture
def training():
    with SimulatedGpu("H200"):
        made = Training(RECIPE)
        made.step(1)
        yield made


def _habits(training) -> dict:
    log = logging.getLogger("nobody listens")
    log.setLevel(logging.CRITICAL)
    host = torch.zeros(2, 17, dtype=torch.long)

    def copy(**how):
        training.tokens = host.to("cuda", **how)
        training.step(2)

    def per_layer():
        hooks = [block.register_forward_hook(read) for block in training.model.transformer.h]
        training.step(2)
        [hook.remove() for hook in hooks]

    return {
        "plain": (lambda: training.step(2), 0),
        "item": (lambda: training.step(2).item(), 1),
        "cpu": (lambda: training.step(2).cpu(), 1),
        "to cpu": (lambda: training.step(2).to("cpu"), 1),
        "tolist": (lambda: training.step(2).tolist(), 1),
        "print": (lambda: repr(training.step(2)), 1),
        "f-string": (lambda: f"{training.step(2):.3f}", 1),
        "logging": (lambda: log.debug(f"{training.step(2).item()}"), 1),
        "logging, lazy": (lambda: log.debug("%s", training.step(2)), 0),
        "every layer": (per_layer, RECIPE.size.layers),
        "blocking copy": (copy, 1),
        "non-blocking copy": (lambda: copy(non_blocking=True), 0),
        "copy_ in place": (lambda: training.tokens.copy_(host), 1),
        "copy_ in place, non-blocking": (lambda: training.tokens.copy_(host, non_blocking=True), 0),
        "synchronize": (lambda: (training.step(2), torch.cuda.synchronize()), 1),
        "event": (lambda: (training.step(2), torch.cuda.Event().synchronize()), 1),
        "host tensors": (lambda: (host.sum().item(), host.tolist(), training.step(2)), 0),
    }


@pytest.mark.parametrize("habit", [
    "plain", "item", "cpu", "to cpu", "tolist", "print", "f-string", "logging", "logging, lazy", "every layer",
    "blocking copy", "non-blocking copy", "copy_ in place", "copy_ in place, non-blocking", "synchronize",
    "event", "host tensors"])
def test_each_habit_waits_as_often_as_it_says(training, habit):
    function, expected = _habits(training)[habit]
    assert syncs.count(function).count == expected


@pytest.mark.parametrize("accumulate, clip", [(1, 0.0), (4, 1.0)])
@pytest.mark.parametrize("optimizer", ["foreach", "fused", "loop"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_recipe_of_ours_waits(accumulate, clip, optimizer, precision):
    recipe = Recipe(model="tiny", batch=1, length=8, accumulate=accumulate, clip=clip, optimizer=optimizer,
                    precision=precision)
    with SimulatedGpu("H200"):
        training = Training(recipe)
        training.step(1)
        assert syncs.count(lambda: training.step(2)).count == 0


@pytest.mark.parametrize("operator, function", [
    ("nonzero", lambda t: (t == 0).nonzero()), ("masked_select", lambda t: torch.masked_select(t, t == 0))])
def test_a_shape_that_depends_on_data_waits(training, operator, function):
    assert [what for what, _ in syncs.count(lambda: function(training.tokens)).waits] == [operator]


def test_a_wait_is_noted_where_the_simulation_cannot_go_on(training):
    watch, noted = syncs.Syncs(), []
    watch.note = noted.append
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueReadError):
        patch.setattr(syncs, "Syncs", lambda: watch)
        syncs.count(lambda: 1 if training.step(2) > 100 else 0)
    assert noted == ["bool"]


def test_the_line_that_waits_is_named(training):
    report = syncs.count(lambda: training.step(2).item())
    assert list(report.places.values()) == [1]
    [(what, where)] = report.places
    assert what == "item" and where.startswith("test_syncs.py:")


def test_everything_is_put_back(training):
    before = (torch.Tensor.item, torch.Tensor.__repr__, torch.cuda.synchronize, torch.cuda.Event.synchronize)
    with pytest.raises(ZeroDivisionError):
        syncs.count(lambda: 1 // 0)
    assert before == (torch.Tensor.item, torch.Tensor.__repr__, torch.cuda.synchronize, torch.cuda.Event.synchronize)


def test_without_a_gpu_there_is_nothing_to_wait_for():
    with pytest.raises(RuntimeError, match="no GPU"):
        syncs.count(lambda: None)


def test_a_real_gpus_warnings_are_counted(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step():
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    report = syncs.count(step)
    assert report.count == 3 and modes == ["warn", 0]
    assert all(place.startswith("test_syncs.py:") for _, place in report.waits)
