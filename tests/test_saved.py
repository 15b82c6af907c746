"""What forward keeps, counted by hooks."""

import pytest
import torch

from gpt2.memory.saved import saved_tensors
from gpt2.memory.simulator import SimulatedGpu
from gpt2.model import GPT2, size


def model_and_input(device="cpu"):
    model = GPT2(size("tiny")).to(device)
    x = torch.zeros(3, 16, 32, device=device, requires_grad=True)
    return model, x, torch.zeros(3, 16, dtype=torch.long).to(device)


def test_the_same_on_the_cpu_and_on_a_simulated_card():
    model, x, tokens = model_and_input()
    here = saved_tensors(model.transformer.h[0], x), saved_tensors(model, tokens)
    with SimulatedGpu("A40", torch="2.5.1"):
        model, x, tokens = model_and_input("cuda")
        there = saved_tensors(model.transformer.h[0], x), saved_tensors(model, tokens)
    for a, b in zip(here, there, strict=True):
        assert a.to_dict("list") == b.to_dict("list")


def test_each_storage_once_and_no_parameters():
    model, x, _ = model_and_input()
    table = saved_tensors(model.transformer.h[0], x)
    assert len(table) == 16
    assert table.uses.sum() == 17  # the probabilities serve softmax and the product with v
    assert table.storage_bytes.sum() == 4 * (16 * 3 * 16 * 32 + 2 * 2 * 3 * 16 + 3 * 2 * 16 * 16) + 16 * 16


def test_the_combined_query_key_value_is_not_kept():
    """The 72 MiB of the published ledger are the three copies that the products of matrices want in one piece."""
    with SimulatedGpu("A40", torch="2.5.1"):
        block = GPT2(size("124M")).cuda().transformer.h[0]
        x = torch.empty(8, 1024, 768, device="cuda", requires_grad=True)
        combined = []
        block.attn.c_attn.register_forward_hook(lambda module, args, c_x: combined.append(c_x.nbytes))
        table = saved_tensors(block, x)
    assert combined == [72 * 2**20]
    assert not (table.storage_bytes == combined[0]).any()
    assert "attn.c_attn" not in set(table.made_by)
    copies = table[(table.module == "attn") & (table.storage_bytes == 24 * 2**20)]
    assert [sorted(shape) for shape in copies["shape"]] == [[64, 96, 1024]] * 3


def test_who_made_and_who_keeps():
    model, x, tokens = model_and_input()
    table = saved_tensors(model, tokens, tokens)
    made_by = dict(zip(table.module, table.made_by, strict=True))  # the last one of each module
    assert made_by["transformer.h.0.mlp.gelu"] == "transformer.h.0.mlp.c_fc"
    assert made_by["transformer.h.0.mlp.c_proj"] == "transformer.h.0.mlp.gelu"
    assert made_by["lm_head"] == "transformer.ln_f"
    first = table[table.module == "transformer.h.1.ln_1"].iloc[0]
    assert first.made_by == "transformer.h.0"


@pytest.mark.parametrize("checkpoint, kept", [("none", 16), ("mlp", 14), ("attention", 10)])
def test_a_checkpointed_sublayer_keeps_its_input_alone(checkpoint, kept):
    model = GPT2(size("tiny"), checkpoint=checkpoint)
    assert len(saved_tensors(model.transformer.h[0], torch.zeros(3, 16, 32, requires_grad=True))) == kept


def test_hooks_are_taken_away_also_after_an_error():
    model, *_ = model_and_input()
    with pytest.raises(ValueError, match="length 17"):
        saved_tensors(model, torch.zeros(1, 17, dtype=torch.long))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
