"""What the savings save, and that they cost no exactness."""

import sys
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from gpt2 import savings
from gpt2.memory.simulator import SimulatedGpu
from gpt2.savings import AdamWSmallMoments, StepInBackward, chunked_cross_entropy
from gpt2.step import Recipe, Training

N, V, C = 1024, 5000, 64
LOGITS = N * V * 4


def plain_cross_entropy(hidden, weight, targets):
    return F.cross_entropy(hidden @ weight.t(), targets)


def gradients(loss_of, rows, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(rows, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(31, 8, dtype=dtype, requires_grad=True)
    loss = loss_of(hidden, weight, torch.randint(0, 31, (rows,)))
    (3 * loss).backward()  # a factor: what comes from above must be handed on
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 7, 12, 13, 100])
def test_chunked_loss_and_gradients_are_those_of_the_plain_one(chunks):
    ours = gradients(lambda *args: chunked_cross_entropy(*args, chunks), 13)
    for got, expected in zip(ours, gradients(plain_cross_entropy, 13), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_chunked_loss_passes_the_numerical_check():
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, 1, 1, 2])
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, targets, 2), (hidden, weight))


def test_chunked_loss_without_gradients():
    hidden, weight, targets = torch.randn(9, 4), torch.randn(7, 4, requires_grad=True), torch.arange(9) % 7
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, weight, targets, 4)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain_cross_entropy(hidden, weight.detach(), targets))


@pytest.mark.parametrize("train_hidden, train_weight", [(True, False), (False, True)])
def test_chunked_loss_gives_only_the_gradients_wanted(train_hidden, train_weight):
    hidden, weight = torch.randn(9, 4, requires_grad=train_hidden), torch.randn(7, 4, requires_grad=train_weight)
    chunked_cross_entropy(hidden, weight, torch.arange(9) % 7, 2).backward()
    assert (hidden.grad is not None) == train_hidden
    assert (weight.grad is not None) == train_weight


def test_chunked_loss_refuses_what_does_not_match():
    hidden, weight = torch.randn(9, 4), torch.randn(7, 4)
    with pytest.raises(ValueError, match="^chunks must be at least 1, not 0$"):
        chunked_cross_entropy(hidden, weight, torch.zeros(9, dtype=torch.long), 0)
    with pytest.raises(ValueError, match="^9 rows of hidden states, but 8 targets$"):
        chunked_cross_entropy(hidden, weight, torch.zeros(8, dtype=torch.long), 2)


def peak_over_logits(loss_of, hold_logits=False):
    """Peak of forward and backward of the loss over what was there before, in units of the full logits."""
    with SimulatedGpu("A40", torch="2.5.1"):
        hidden = torch.empty(N, C, device="cuda", requires_grad=True)
        weight = torch.empty(V, C, device="cuda", requires_grad=True)
        targets = torch.zeros(N, dtype=torch.long, device="cuda")
        (hidden[:2] @ weight[:2].t()).sum().backward()  # workspaces exist from here on
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_of(hidden, weight, targets).backward()
        return (torch.cuda.max_memory_allocated() - before) / LOGITS


@pytest.mark.parametrize("chunks, published", [(4, 0.82), (8, 0.45), (16, 0.26)])
def test_chunked_loss_peaks_at_three_chunks_and_two_gradients(chunks, published):
    """3/k logits, the weight's gradient V·C and the hidden one N·C; blocks may be up to 1 % of the logits larger."""
    peak = peak_over_logits(lambda *args: chunked_cross_entropy(*args, chunks))
    payload = 3 / chunks + (V * C + N * C) * 4 / LOGITS
    assert payload == pytest.approx(published, abs=0.006)
    assert payload <= peak < payload + 0.01


def test_plain_loss_peaks_at_three_logits_or_four_if_they_are_held():
    def held(*args):
        logits = args[0] @ args[1].t()
        loss = F.cross_entropy(logits, args[2])
        loss.logits = logits
        return loss

    assert peak_over_logits(plain_cross_entropy) == pytest.approx(3, abs=0.1)
    assert peak_over_logits(held) == pytest.approx(4, abs=0.1)


# --- liger-kernel, where it is installed -----------------------------------------------------------------------------

TINY = {"model": "tiny", "batch": 4, "length": 16}


@pytest.fixture
def liger(monkeypatch):
    """A liger-kernel whose loss has its signature and no Triton."""

    class Fused:
        def __call__(self, weight, hidden, targets):
            return plain_cross_entropy(hidden, weight, targets)

    fake = ModuleType("liger_kernel.transformers")
    fake.LigerFusedLinearCrossEntropyLoss = Fused
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", fake)
    monkeypatch.setattr(savings, "find_spec", lambda name: True)


def test_ligers_loss_where_it_is_missing_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(savings, "find_spec", lambda name: None if name == "triton" else True)
    with pytest.raises(ValueError, match="^loss 'liger' wants a GPU and `pip install liger-kernel==.*has no triton$"):
        Recipe(loss="liger")


def test_a_step_with_ligers_loss_learns_what_the_plain_one_does(liger):
    ours, plain = (Training(Recipe(**TINY, loss=loss), device="cpu") for loss in ("liger", "full"))
    for number in range(1, 4):
        torch.testing.assert_close(ours.step(number), plain.step(number))


def test_ligers_loss_on_a_simulated_gpu_is_one_clear_line(liger):
    with SimulatedGpu("H200"), pytest.raises(ValueError, match="^loss 'liger' is made of Triton kernels, which a sim"):
        Training(Recipe(**TINY, loss="liger")).step(1)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_small_moments_are_small_and_close(options):
    torch.manual_seed(0)
    plain, small = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    small.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.AdamW(plain.parameters(), lr=1e-2, **options),
                  AdamWSmallMoments(small.parameters(), lr=1e-2, **options)]
    for _ in range(5):
        x = torch.randn(16, 64)
        for model, optimizer in zip((plain, small), optimizers, strict=True):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = optimizers[1].state[small.weight]
    assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    torch.testing.assert_close(small.weight, plain.weight, rtol=0, atol=5 * 1e-2 * 2**-7)


def test_the_risk_of_small_moments_is_real():
    """Gradients shrink a hundredfold: the exact second moment decays, the rounded one stays where it was."""
    values = {}
    for optimizer in (torch.optim.AdamW, AdamWSmallMoments):
        weight = torch.nn.Parameter(torch.zeros(1))
        adamw = optimizer([weight], lr=1e-3)
        for step in range(1000):
            weight.grad = torch.full((1,), 1.0 if step < 200 else 0.01)
            adamw.step()
            if step == 199:
                before = adamw.state[weight]["exp_avg_sq"].item()
        values[optimizer] = adamw.state[weight]["exp_avg_sq"].item() / before
    assert values[torch.optim.AdamW] == pytest.approx(0.999**800, rel=0.01)
    assert values[AdamWSmallMoments] == 1


def test_step_in_backward_keeps_no_gradient():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    before = [p.detach().clone() for p in model.parameters()]
    stepping = StepInBackward(model.parameters(), torch.optim.AdamW)
    model(torch.randn(4, 8)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all((p != b).any() for p, b in zip(model.parameters(), before, strict=True))
    after = [p.detach().clone() for p in model.parameters()]
    stepping.step()
    stepping.zero_grad()
    assert all((p == a).all() for p, a in zip(model.parameters(), after, strict=True))
