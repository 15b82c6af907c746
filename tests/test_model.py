"""The subject is GPT-2: the same function as transformers' on the same weights, and the size it is said to have."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2.model import GPT2, SIZES, Size, size

MiB = 2**20
# Vd + Td + L(12d² + 13d) + 2d: embeddings, blocks, final norm; the head is the token embedding.
PARAMETERS = {
    "tiny": 29_216, "124M": 124_439_808, "350M": 354_823_168, "774M": 774_030_080, "1558M": 1_557_611_200,
    "1.3B": 1_315_196_928,
}


def meta(name: str, **options) -> GPT2:
    with torch.device("meta"):
        return GPT2(size(name), **options)


def from_transformers(theirs: GPT2LMHeadModel, ours: GPT2) -> None:
    """Copy weights by name; their Conv1D keeps matrices as (in, out), a Linear as (out, in)."""
    weights = theirs.state_dict()
    transposed = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    for name, parameter in ours.named_parameters():
        weight = weights[name]
        with torch.no_grad():
            parameter.copy_(weight.t() if name.endswith(transposed) else weight)


@pytest.fixture(scope="module")
def theirs():
    """A small GPT-2 of another hand, float64, every weight and bias random."""
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=101, n_positions=16, n_embd=32, n_layer=2, n_head=2, activation_function="gelu_new",
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager")
    model = GPT2LMHeadModel(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
@pytest.mark.parametrize("length", [16, 7, 1])
def test_logits_and_loss_equal_transformers(theirs, attention, length):
    ours = GPT2(size("tiny"), attention=attention).double()
    from_transformers(theirs, ours)
    tokens, targets = torch.randint(0, 101, (2, 3, length))
    expected = theirs(tokens).logits
    logits, loss = ours(tokens, targets)
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-11)
    by_hand = torch.nn.functional.cross_entropy(expected.reshape(-1, 101), targets.reshape(-1))
    torch.testing.assert_close(loss, by_hand, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_counted_once(name):
    model = meta(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert model.lm_head.weight is model.transformer.wte.weight


def test_every_named_size_is_here():
    assert set(PARAMETERS) == set(SIZES)


def test_the_tied_head_is_one_storage():
    model = GPT2(size("tiny"))
    assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    with torch.no_grad():
        model.transformer.wte.weight[3, 5] = 7.0
    assert model.lm_head.weight[3, 5] == 7.0


def test_tied_head_collects_both_halves_of_its_gradient(theirs):
    ours = GPT2(size("tiny")).double()
    from_transformers(theirs, ours)
    tokens, targets = torch.randint(0, 101, (2, 3, 16))
    ours(tokens, targets)[1].backward()
    logits = theirs(tokens).logits
    theirs.zero_grad()
    torch.nn.functional.cross_entropy(logits.view(-1, 101), targets.view(-1)).backward()
    expected = dict(theirs.named_parameters())["transformer.wte.weight"].grad
    torch.testing.assert_close(ours.transformer.wte.weight.grad, expected, rtol=1e-10, atol=1e-12)


def test_causal_masks_are_48_mib_of_floats():
    masks = [(buffer.dtype, buffer.shape, buffer.nbytes) for buffer in meta("124M").buffers()]
    assert masks == [(torch.float32, (1, 1, 1024, 1024), 4 * MiB)] * 12
    assert not list(meta("124M", attention="sdpa").buffers())


@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_no_position_sees_a_later_one(attention):
    model = GPT2(size("tiny"), attention=attention)
    tokens = torch.randint(0, 101, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 101
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)).min() > 0


def test_initialisation_happened():
    """Had it run before the layers existed, PyTorch's own scales would be found: 1 for embeddings."""
    torch.manual_seed(0)
    model = GPT2(Size(layers=2, width=256, heads=4, vocabulary=1000, context=64))
    for name, parameter in model.named_parameters():
        if "ln_" in name:
            assert (parameter == (1 if name.endswith("weight") else 0)).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.03), name


def test_untrained_loss_is_that_of_a_uniform_guess():
    torch.manual_seed(0)
    model = GPT2(size("tiny"))
    tokens, targets = torch.randint(0, 101, (2, 32, 16))
    assert model(tokens, targets)[1].item() == pytest.approx(math.log(101), abs=0.05)


def test_untrained_loss_of_124m_on_random_tokens():
    """ln 50,257 = 10.82 for a uniform guess; logits of standard deviation s cost about s²/2 more."""
    torch.manual_seed(0)
    model = GPT2(size("124M"))
    tokens, targets = torch.randint(0, 50_257, (2, 1, 128))
    with torch.no_grad():
        logits, loss = model(tokens, targets)
    excess = logits.var().item() / 2
    assert loss.item() == pytest.approx(math.log(50_257) + excess, abs=0.1)
    assert 10.7 < loss.item() < 11.3


@pytest.mark.parametrize("wrong, said", [
    ({"width": 30, "heads": 4}, "width 30 is not divisible by 4 heads"),
    ({"layers": 0}, "layers must be at least 1, not 0"),
    ({"vocabulary": -1}, "vocabulary must be at least 1, not -1"),
    ({"heads": 0}, "heads must be at least 1, not 0"),
])
def test_bad_sizes_are_refused_in_one_line(wrong, said):
    with pytest.raises(ValueError) as error:
        Size(**wrong)
    assert str(error.value) == said


def test_unknown_model_lists_the_known():
    with pytest.raises(ValueError) as error:
        size("13B")
    assert str(error.value) == "unknown model '13B'; known: tiny, 124M, 350M, 774M, 1558M, 1.3B"


def test_too_long_an_input_is_refused():
    with pytest.raises(ValueError, match="length 17 is above the model's context of 16"):
        GPT2(size("tiny"))(torch.zeros(1, 17, dtype=torch.long))
