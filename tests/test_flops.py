"""FLOPs by PyTorch's counter and by formula; launches and bytes of the optimizer by arithmetic and by recording."""

import pytest
import torch

from gpt2.model import GPT2, SIZES, size
from gpt2.step import Recipe
from gpt2.study import flops, launches


def sizes(model: str) -> list[int]:
    with torch.device("meta"):
        return [p.numel() for p in GPT2(size(model), attention="sdpa").parameters()]


def by_phase(recipe: Recipe) -> dict[str, int]:
    return flops.counted(recipe).groupby("phase")["flop_count"].sum().to_dict()


@pytest.mark.parametrize("batch, length", [(8, 1024), (3, 100)])
def test_the_formula_is_pytorchs_count_and_backward_is_twice_forward(batch, length):
    recipe = Recipe(batch=batch, length=length)
    counted = by_phase(recipe)
    assert counted["forward"] == flops.forward(recipe.size, batch, length)["flop_count"].sum()
    assert counted["backward"] == flops.backward(recipe.size, batch, length) == 2 * counted["forward"]
    assert set(counted) == {"forward", "backward"}
    assert flops.model_flops(recipe.size, batch, length) == 3 * counted["forward"]


def test_fused_attention_multiplies_once_more_in_backward():
    recipe = Recipe(batch=2, length=256, precision="bf16", attention="sdpa")
    counted = by_phase(recipe)
    assert counted["backward"] == flops.backward(recipe.size, 2, 256, fused_attention=True)
    assert counted["backward"] > 2 * counted["forward"]


def test_checkpointing_computes_the_blocks_again_but_for_their_last_layer():
    """The recomputation ends when all that backward needs is there; nobody needs the output of `mlp.c_proj`."""
    recipe = Recipe(batch=2, length=64, checkpoint="block")
    counted, rows = by_phase(recipe), flops.forward(recipe.size, 2, 64)["flop_count"]
    assert counted["backward"] == 2 * rows.sum() + rows[0] * 2 // 3 + rows[1]


def test_six_flops_per_parameter_and_token_is_a_fair_rule():
    recipe = Recipe()
    rule = 6 * sum(sizes("124M")) * recipe.tokens
    assert flops.model_flops(recipe.size, 8, 1024) / rule == pytest.approx(1.14, abs=0.01)  # attention is the rest


def test_operators_of_a_step_are_a_few_hundred_and_more_in_backward():
    calls = flops.operators(Recipe(batch=2, length=64, clip=1.0)).groupby("phase")["call_count"].sum()
    assert calls["forward"] == 237 and calls["backward"] == 346 and calls["optimizer"] == 8
    assert set(calls.index) == {"forward", "backward", "clip", "optimizer"}


@pytest.mark.parametrize("sizes_, lists, expected", [
    ([], 1, 0), ([0, 0], 1, 0), ([1], 4, 1),
    ([65_536 * 320], 1, 1), ([65_536 * 320 + 1], 1, 2),
    ([1] * 110, 1, 1), ([1] * 111, 1, 2), ([1] * 36, 4, 1), ([1] * 37, 4, 2),
    ([65_536 * 319, 65_536 * 2], 1, 2),
])
def test_tensors_and_chunks_fill_a_launch(sizes_, lists, expected):
    assert launches.multi_tensor(sizes_, lists) == expected


def test_the_fused_update_moves_28_bytes_and_the_others_80():
    assert {name: launches.adamw_bytes_per_parameter(name) for name in launches.PASSES} == {
        "loop": 80, "foreach": 80, "fused": 28}
    total = 28 * sum(sizes("1.3B"))
    assert total / 1e9 == pytest.approx(36.8, abs=0.1) and total / 3.35e12 == pytest.approx(0.011, abs=0.0005)


@pytest.mark.parametrize("model", ["124M", "1.3B"])
def test_the_loop_launches_several_kernels_per_tensor(model):
    assert launches.adamw_kernels(sizes(model), "loop") == 8 * len(sizes(model))
    order = [launches.adamw_kernels(sizes(model), name) for name in ("loop", "foreach", "fused")]
    assert order == sorted(order, reverse=True)


def test_every_size_has_a_formula():
    for name, chosen in SIZES.items():
        assert (flops.forward(chosen, 1, min(16, chosen.context))["flop_count"] > 0).all(), name
