"""The step by hand is the step of autograd: same loss, gradients, weights, and the same tensors kept in between."""

import pytest
import torch
from torch.nn import functional as F

from gpt2 import by_hand
from gpt2.model import GPT2, size

BOUND = dict(rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A tiny model's operators are too short to share: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pair():
    """A model of autograd and its copy by hand, float64, biases and norms random too, with tokens and targets."""
    torch.manual_seed(0)
    model = GPT2(size("tiny")).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    tokens, targets = torch.randint(0, 101, (2, 3, 13))
    return model, by_hand.GPT2(model), tokens, targets


def test_loss_and_gradients_equal_autograd(pair):
    model, ours, tokens, targets = pair
    loss, saved = ours.forward(tokens, targets)
    ours.backward(saved)
    expected = model(tokens, targets)[1]
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), **BOUND)
    assert not saved
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours.parameters[name].grad, parameter.grad, **BOUND, msg=name)


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_three_steps_equal_adamw(pair, clip):
    model, ours, tokens, targets = pair
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for t in (1, 2, 3):
        loss = by_hand.step(ours, tokens, targets, t, clip=clip, lr=3e-3)
        expected = model(tokens, targets)[1]
        expected.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, expected.detach(), **BOUND)
    for name, parameter in model.named_parameters():
        by_hand_parameter, state = ours.parameters[name], optimizer.state[parameter]
        torch.testing.assert_close(by_hand_parameter.value, parameter.detach(), **BOUND, msg=name)
        torch.testing.assert_close(by_hand_parameter.m, state["exp_avg"], **BOUND, msg=name)
        torch.testing.assert_close(by_hand_parameter.v, state["exp_avg_sq"], **BOUND, msg=name)
        assert by_hand_parameter.grad is None


def test_the_weights_loaded_are_copies(pair):
    model, ours, tokens, targets = pair
    before = model.lm_head.weight.detach().clone()
    by_hand.step(ours, tokens, targets, 1)
    assert (model.lm_head.weight == before).all()
    assert ours.lm_head.weight is ours.wte.weight


def test_layers_of_pytorch_one_by_one():
    torch.manual_seed(0)
    x, dy = torch.randn(2, 2, 4, 8, dtype=torch.float64)
    x.requires_grad_()
    weight, bias = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    square = torch.randn(8, 8, dtype=torch.float64)
    layers = [
        (by_hand.Gelu(), F.gelu(x, approximate="tanh")),
        (by_hand.LayerNorm(by_hand.Parameter(weight), by_hand.Parameter(bias)), F.layer_norm(x, (8,), weight, bias)),
        (by_hand.Linear(by_hand.Parameter(square), by_hand.Parameter(bias)), F.linear(x, square, bias)),
    ]
    for layer, expected in layers:
        y, context = layer.forward(x.detach())
        torch.testing.assert_close(y, expected.detach(), **BOUND)
        torch.testing.assert_close(layer.backward(dy, context), torch.autograd.grad(expected, x, dy)[0], **BOUND)


def storages(tensors, model) -> list[torch.Tensor]:
    """The contents of what these tensors keep alive: each storage once, the model's own weights and masks left out."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = torch.empty(0, dtype=tensor.dtype).set_(storage)
    return list(found.values())


def flat(context) -> list[torch.Tensor]:
    return [context] if isinstance(context, torch.Tensor) else [t for part in context for t in flat(part)]


def pair_up(ours: list[torch.Tensor], autograds: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give each of ours a partner of the same type, size and content; returns the partnerless of autograd's."""
    rest = list(autograds)
    for tensor in ours:
        for i, other in enumerate(rest):
            alike = tensor.dtype == other.dtype and tensor.shape == other.shape
            if alike and torch.allclose(tensor, other, 1e-10, 1e-12):
                del rest[i]
                break
        else:
            raise AssertionError(f"autograd keeps no {tensor.dtype} of {tensor.numel()} elements with this content")
    return rest


def kept_by_autograd(call) -> list[torch.Tensor]:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.detach()) or t, lambda t: t):
        call()
    return kept


def test_a_blocks_context_is_what_autograd_saves_tensor_for_tensor(pair):
    model, ours, *_ = pair
    x = torch.randn(3, 13, 32, dtype=torch.float64, requires_grad=True)
    for block, by_hand_block in zip(model.transformer.h, ours.blocks, strict=True):
        autograds = storages(kept_by_autograd(lambda block=block: block(x)), model)
        context = storages(flat(by_hand_block.forward(x.detach())[1]), model)
        assert len(context) == 16
        assert pair_up(context, autograds) == []


def test_the_whole_step_keeps_what_autograd_saves_tensor_for_tensor(pair):
    model, ours, tokens, targets = pair
    autograds = storages(kept_by_autograd(lambda: model(tokens, targets)), model)
    context = storages(flat(ours.forward(tokens, targets)[1]), model)
    assert pair_up(context, autograds) == []
