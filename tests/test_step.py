"""The step, for real, on the CPU: whatever the recipe saves, it is the same training."""

from contextlib import contextmanager

import pytest
import torch

from gpt2.step import PHASES, Recipe, Training, unwatched

TINY = {"model": "tiny", "batch": 4, "length": 16}
EXACT = dict(rtol=2e-5, atol=2e-6)  # fp32, another order of summation
BF16 = dict(rtol=2**-6, atol=2**-9)  # 8 significant bits, a few roundings deep

SAME = [
    ({"attention": "sdpa"}, EXACT),
    ({"checkpoint": "block"}, EXACT),
    ({"checkpoint": "every-2"}, EXACT),
    ({"checkpoint": "attention"}, EXACT),
    ({"checkpoint": "mlp"}, EXACT),
    ({"loss": "chunked"}, EXACT),
    ({"loss": "chunked", "loss_chunks": 7}, EXACT),
    ({"loss": "chunked", "loss_chunks": 1000}, EXACT),
    ({"optimizer": "loop"}, EXACT),
    ({"optimizer": "fused"}, EXACT),
    ({"keep_logits": False}, EXACT),
    ({"set_to_none": False}, EXACT),
    ({"clip": 1e6}, EXACT),
    ({"step_in_backward": True}, EXACT),
    ({"precision": "bf16"}, BF16),
    ({"precision": "bf16", "loss": "chunked", "checkpoint": "block", "attention": "sdpa"}, BF16),
    ({"checkpoint": "mlp", "loss": "chunked", "optimizer": "fused", "step_in_backward": True}, EXACT),
]


def run(steps: int = 3, **options):
    """Losses, the gradients that the first optimizer step saw, and the weights in the end; all float32."""
    seen = {}

    @contextmanager
    def watch(phase, step):
        if phase == "optimizer" and step == 1:
            seen.update({name: p.grad.clone() for name, p in training.model.named_parameters() if p.grad is not None})
        yield

    training = Training(Recipe(**TINY | options), device="cpu", watch=watch)
    losses = torch.stack([training.step(n).float() for n in range(1, steps + 1)])
    return losses, seen, {name: p.detach() for name, p in training.model.named_parameters()}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A tiny model's operators are too short to share: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def baseline():
    return run()


@pytest.fixture(scope="module")
def curve():
    """The baseline's loss over 50 steps."""
    return run(steps=50)[0]


@pytest.mark.parametrize("options, bound", SAME, ids=str)
def test_an_option_changes_neither_loss_nor_gradients(baseline, options, bound):
    losses, gradients, _ = run(**options)
    torch.testing.assert_close(losses, baseline[0], **bound)
    assert set(gradients) == (set() if options.get("step_in_backward") else set(baseline[1]))
    for name, gradient in gradients.items():
        scale = baseline[1][name].abs().max()  # a gradient's error is relative to the tensor, not to each element
        assert (gradient - baseline[1][name]).abs().max() <= scale * bound["rtol"] * 4 + 1e-9, name


def test_the_step_in_backward_ends_at_the_same_weights(baseline):
    weights = run(step_in_backward=True)[2]
    for name, weight in baseline[2].items():
        torch.testing.assert_close(weights[name], weight, **EXACT, msg=name)


def test_two_micro_batches_of_the_same_tokens_are_one(baseline):
    losses, gradients, _ = run(accumulate=2)
    torch.testing.assert_close(losses, baseline[0], **EXACT)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, baseline[1][name], **EXACT, msg=name)


def test_clipping_bounds_the_norm():
    gradients = run(steps=1, clip=0.01)[1].values()
    assert torch.stack([g.norm() for g in gradients]).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_small_moments_train_like_large_ones_for_50_steps(curve):
    """The risk of 16-bit moments shows in long runs; here the curve stays within 2 % of the fp32 one."""
    assert curve[-1] < curve[0] - 0.5
    torch.testing.assert_close(run(steps=50, moments="bf16")[0], curve, rtol=0.02, atol=0)


@pytest.mark.parametrize("options", [
    {"checkpoint": "block", "loss": "chunked", "attention": "sdpa", "step_in_backward": True},
    {"precision": "bf16", "loss": "chunked", "checkpoint": "every-2"},
])
def test_savings_follow_the_loss_curve_of_50_steps(options, curve):
    bound = 0.02 if options.get("precision") == "bf16" else 1e-4
    torch.testing.assert_close(run(steps=50, **options)[0], curve, rtol=bound, atol=0)


def test_moments_of_the_step_are_announced_in_order():
    announced = []

    def watch(phase, step):
        announced.append((step, phase))
        return unwatched(phase, step)

    Training(Recipe(**TINY, clip=1.0), device="cpu", watch=watch).step(1)
    assert [phase for _, phase in announced] == list(PHASES)
    assert [step for step, _ in announced] == [0] * 4 + [1] * 6


def test_inputs_and_targets_are_shifted_along_the_tokens_not_the_batch():
    training = Training(Recipe(**TINY), device="cpu")
    assert training.tokens.shape == (4, 17)
    with torch.no_grad():
        _, loss = training.model(training.tokens[:, :-1], training.tokens[:, 1:])
    assert training.step(1).item() == loss.item()


@pytest.mark.parametrize("wrong, said", [
    ({"batch": 0}, "batch must be a whole number of at least 1, not 0"),
    ({"batch": 1.5}, "batch must be a whole number of at least 1, not 1.5"),
    ({"length": 0}, "length must be a whole number of at least 1, not 0"),
    ({"length": 1025}, "length 1025 is above the context of 124M, 1024"),
    ({"accumulate": 0}, "accumulate must be a whole number of at least 1, not 0"),
    ({"loss_chunks": 0}, "loss_chunks must be a whole number of at least 1, not 0"),
    ({"model": "125M"}, "model '125M' is not one of: tiny, 124M, 350M, 774M, 1558M, 1.3B"),
    ({"precision": "fp8"}, "precision 'fp8' is not one of: fp32, bf16, fp16"),
    ({"attention": "flash"}, "attention 'flash' is not one of: explicit, sdpa"),
    ({"checkpoint": "every-0"},
     "checkpoint 'every-0' is not one of: none, block, attention, mlp, every-2, every-3, ..."),
    ({"checkpoint": "blocks"},
     "checkpoint 'blocks' is not one of: none, block, attention, mlp, every-2, every-3, ..."),
    ({"loss": "fused"}, "loss 'fused' is not one of: full, chunked, liger"),
    ({"optimizer": "sgd"}, "optimizer 'sgd' is not one of: foreach, fused, loop"),
    ({"moments": "fp16"}, "moments 'fp16' is not one of: fp32, bf16"),
    ({"clip": -1.0}, "clip must be at least 0, not -1"),
    ({"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1"),
    ({"step_in_backward": True, "clip": 1.0},
     "step_in_backward needs each gradient final at once: no clip, accumulate or fp16 with it"),
    ({"step_in_backward": True, "accumulate": 2},
     "step_in_backward needs each gradient final at once: no clip, accumulate or fp16 with it"),
])
def test_a_bad_recipe_is_refused_in_one_line(wrong, said):
    with pytest.raises(ValueError) as error:
        Recipe(**wrong)
    assert str(error.value) == said


def test_a_recipe_describes_itself():
    assert Recipe().describe() == "GPT-2 124M, batch 8 x 1,024, fp32, AdamW foreach"
    assert Recipe(checkpoint="block").describe() == "GPT-2 124M, batch 8 x 1,024, fp32, AdamW foreach, checkpoint block"
    assert Recipe(batch=4, length=512).tokens == 2048
