"""What is known of a simulated tensor's contents without computing them."""

import math
import warnings

import pytest
import torch

from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.values import ValueReadError


@pytest.fixture
def card():
    with SimulatedGpu("A40") as simulated, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield simulated


def test_guards_against_bad_numbers_let_a_program_go_on(card):
    loss, gradient = torch.randn((), device="cuda"), torch.randn(3000, 4000, device="cuda")
    assert not torch.isnan(loss) and not torch.isinf(loss) and torch.isfinite(loss)
    assert not (torch.isnan(loss) or torch.isinf(loss)) and not loss.isnan().any()
    assert not torch.isnan(gradient).any() and torch.isfinite(gradient).all() and not (gradient != gradient).any()
    assert not (gradient.abs() == math.inf).any()
    for unknown in (gradient == -math.inf, gradient == 0, gradient == gradient.clone()):
        with pytest.raises(ValueReadError):
            bool(unknown.any())


def test_a_scaler_steps_every_time_and_its_scale_is_known(card):
    weight = torch.nn.Parameter(torch.randn(8, device="cuda"))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(scaler.get_scale()))
    for _ in range(3):
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert steps == [1024.0, 1024.0, 2048.0] and scaler.get_scale() >= 2048.0


def test_constants_of_any_size_are_known_and_cost_the_host_nothing(card):
    ones = torch.ones(2**20, 2**10, dtype=torch.float16, device="cuda")
    assert (ones * 3 - 1)[5, 5] == 2 and (ones > 0)[0].all()
    assert card.tracker.known.contents[ones.untyped_storage()._cdata].untyped_storage().nbytes() < 1024
    ones[0] = 5
    with pytest.raises(ValueReadError):
        bool(ones[0, 0] == 5)
    ones.fill_(7.0)
    assert ones[3, 3] == 7
    small = torch.zeros(3, 4, device="cuda")
    small[1] += 2
    assert small.sum() == 8 and (small + torch.tensor(1).cuda())[0, 0].item() == 1.0


def test_floats_of_the_host_are_followed(card):
    same = torch.arange(512).remainder(256)
    positive = (same[:, None] == same[None]).float().cuda()
    assert torch.randn(512, 512, device="cuda")[positive.bool()].shape == (1024,)


def test_operators_that_answer_with_a_number(card):
    a, b = torch.arange(3).cuda(), torch.arange(3).cuda()
    assert torch.equal(a, b) and not torch.equal(a, b + 1) and torch.allclose(a, b)


def test_nothing_is_kept_of_what_is_gone_or_never_was_on_the_card(card):
    kept = torch.arange(3).cuda()
    torch.zeros(0, 3, device="cuda").sum(0), torch.arange(5).cuda() + 1, torch.arange(3) == kept.cpu()
    with torch.no_grad():
        torch.empty(4, device="meta").zero_()
    assert set(card.tracker.known.contents) == {kept.untyped_storage()._cdata} <= set(card.tracker.live)
