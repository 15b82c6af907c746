"""The end of the step in bytes, without a GPU: cases 10 to 14 of people who asked, and state that comes early."""

import copy
import gc

import pytest
import torch
from torch.optim.optimizer import _default_to_fused_or_foreach as default_implementation

from gpt2.early_state import allocate_state
from gpt2.memory.ledger import peak_owner
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.trace import Category
from gpt2.model import GPT2, size
from gpt2.step import Recipe, Training
from gpt2.study.experiments import Experiment, predict

MIB = 2**20


def shapes(model: str) -> list[torch.Size]:
    with torch.device("meta"):
        return [p.shape for p in GPT2(size(model), attention="sdpa").parameters()]


def parameters(model: str) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes(model)]
    for parameter in made:
        parameter.grad = torch.empty_like(parameter)
    return made


def peak_of(function) -> int:
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("implementation, later", [("foreach", 1.0), ("fused", 0.0), ("loop", None)])
def test_an_update_needs_one_more_copy_of_the_weights_or_two_tensors_or_nothing(implementation, later):
    with SimulatedGpu("H200"):
        made = parameters("124M")
        held = torch.cuda.memory_allocated()
        weights, largest = held // 2, max(p.nbytes for p in made)
        options = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
        optimizer = torch.optim.AdamW(made, **options)
        first = peak_of(optimizer.step) - held
        floor = torch.cuda.memory_allocated()
        extra = peak_of(optimizer.step) - floor
    expected = 2 * largest if later is None else later * weights
    counters = 512 * len(made) if implementation == "fused" else 0  # the count of steps is on the device too
    assert floor == held + 2 * weights + counters
    assert extra == pytest.approx(expected, abs=2 * MIB)
    assert first == pytest.approx(2 * weights + expected, abs=2 * MIB)


def test_the_default_is_foreach_on_a_gpu_and_the_loop_on_a_cpu():
    def default_extra() -> int:
        made = parameters("124M")
        optimizer = torch.optim.AdamW(made)
        optimizer.step()
        return peak_of(optimizer.step) - torch.cuda.memory_allocated()

    with SimulatedGpu("H200"):
        assert default_extra() == pytest.approx(sum(4 * s.numel() for s in shapes("124M")), rel=0.01)
    assert default_implementation([torch.nn.Parameter(torch.zeros(2))], differentiable=False) == (False, False)


def test_at_a_small_batch_the_peak_is_the_update_and_bf16_saves_nothing():
    peaks = {}
    for precision in ("fp32", "bf16"):
        trace = predict(Experiment(precision, Recipe(batch=1, length=128, precision=precision)), "H200")
        owner = peak_owner(trace, steps=(2, 3))
        peaks[precision] = owner.allocated_bytes
        assert owner.phase == "optimizer"
    assert peaks["bf16"] == pytest.approx(peaks["fp32"], rel=0.002)


def _step_with_gradients_dropped(when: str) -> tuple[int, int]:
    """(allocated at the end of forward, peak of the step) of the second step; gradients go at this place."""
    with SimulatedGpu("H200"):
        training = Training(Recipe(batch=4, length=512))
        drop = training.optimizer.zero_grad
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            if when == "before forward":
                drop()
            elif when == "zeroed":
                drop(set_to_none=False)
            _, loss = training.model(training.tokens[:, :-1], training.tokens[:, 1:])
            after_forward = torch.cuda.memory_allocated()
            if when == "between":
                drop()
            loss.backward()
            training.optimizer.step()
            if when == "end of step":
                drop()
        return after_forward, torch.cuda.max_memory_allocated()


def test_gradients_dropped_before_forward_are_not_there_at_its_end():
    gradients = sum(4 * shape.numel() for shape in shapes("124M"))
    kept, peak_kept = _step_with_gradients_dropped("zeroed")
    early, peak_early = _step_with_gradients_dropped("before forward")
    between, peak_between = _step_with_gradients_dropped("between")
    late, peak_late = _step_with_gradients_dropped("end of step")
    assert kept - early == pytest.approx(gradients, rel=0.02)  # blocks are a little larger than requests
    assert (between, late) == (kept, early)
    assert peak_late == peak_early < peak_kept
    assert peak_between < peak_kept  # but they are gone when backward's peak comes


def test_clipping_takes_scalars_and_one_small_buffer():
    with SimulatedGpu("H200"):
        made = parameters("124M")
        held = torch.cuda.memory_allocated()
        extra = peak_of(lambda: torch.nn.utils.clip_grad_norm_(made, 1.0)) - held
        assert len(made) == 148 and 0 < extra < MIB // 2
        assert torch.cuda.memory_allocated() == held


def test_a_checkpoint_that_stays_alive_costs_its_weights_because_its_moments_become_the_state():
    """Loading brings 12 bytes per parameter; `load_state_dict` adopts the 8 of the moments and copies the other 4."""
    recipe = Recipe(batch=1, length=16, attention="sdpa")
    with SimulatedGpu("H200"):
        before = Training(recipe)
        before.step(1)
        count = sum(p.numel() for p in before.model.parameters())
        saved = copy.deepcopy({"model": before.model.state_dict(), "optimizer": before.optimizer.state_dict()})
        before = Training(recipe)
        gc.collect()
        with_dict = torch.cuda.memory_allocated()
        before.model.load_state_dict(saved["model"])
        before.optimizer.load_state_dict(saved["optimizer"])
        assert torch.cuda.memory_allocated() == with_dict  # nothing new: 4 + 12 bytes per parameter
        del saved
        gc.collect()
        freed = with_dict - torch.cuda.memory_allocated()
    assert freed / count == pytest.approx(4, rel=0.02)


# --- state that comes early ---------------------------------------------------------------------------------------


def _tiny(implementation: str) -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    torch.manual_seed(1)
    made = [torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64)), torch.nn.Parameter(torch.randn(5))]
    options = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    return made, torch.optim.AdamW(made, lr=0.1, weight_decay=0.3, **options)


def _train(made, optimizer, steps: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for parameter in made:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()
    return [p.detach().clone() for p in made]


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
def test_state_allocated_early_changes_no_update(implementation):
    expected = _train(*_tiny(implementation))
    made, optimizer = _tiny(implementation)
    assert allocate_state(optimizer) > 0 and allocate_state(optimizer) == 0
    assert all(torch.equal(a, b) for a, b in zip(_train(made, optimizer), expected, strict=True))


def test_a_step_with_zero_gradients_does_change_them():
    expected = _train(*_tiny("loop"))
    made, optimizer = _tiny("loop")
    for parameter in made:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert not any(torch.allclose(a, b, atol=1e-3) for a, b in zip(_train(made, optimizer), expected, strict=True))


@pytest.mark.parametrize("implementation", ["foreach", "fused", "loop"])
def test_early_state_is_what_the_first_step_would_have_allocated(implementation):
    floors = []
    for early in (True, False):
        with SimulatedGpu("A40"):
            training = Training(Recipe(batch=1, length=16, optimizer=implementation))
            before = torch.cuda.memory_allocated()
            if early:
                added = allocate_state(training.optimizer)
                assert torch.cuda.memory_allocated() - before >= added > 0
            training.step(1)
            floors.append(torch.cuda.memory_allocated())
    assert floors[0] == pytest.approx(floors[1], abs=MIB)


def test_the_first_update_makes_the_state_and_later_ones_none():
    trace = predict(Experiment("base", Recipe(batch=1, length=128)), "A40")
    born = [b.event for b in trace.blocks() if b.event.category == Category.OPTIMIZER.value]
    assert {e.step for e in born} == {1} and len(born) == 2 * 148
