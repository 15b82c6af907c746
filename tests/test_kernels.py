"""Kernels on a simulated H200 against what a real one allocated for them, operation by operation.

The recording is results/measured/h200/kernel-probes.json: torch 2.11.0+cu130, cuDNN 9.19. A probe's list holds every
allocation and free of its forward or backward. Frees that follow one another are compared as a set: their order has
no effect on what comes after.
"""

import json
from pathlib import Path

import pytest
import torch

from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.values import ValueReadError
from gpt2.study.probes import kernels

RECORDED = json.loads(
    (Path(__file__).parents[1] / "results/measured/h200/kernel-probes.json").read_text(encoding="utf-8")
)["probes"]
MADE = {name: make for name, make in kernels.probes() if "error" not in RECORDED.get(name, {"error": ""})}

# What depends on values is refused, with the program's line.
REFUSED = ("bool index", "nonzero", "unique", "bincount", "allclose")
DIFFERENT = {  # (probe, "forward" or "backward"): why
    ("print", "forward"): "printing computes on the values; a simulated tensor has none and prints its shape",
    ("svd", "forward"): "cuSOLVER's workspaces are not modelled",
}


@pytest.fixture(scope="module")
def card():
    with SimulatedGpu("H200", torch="2.11.0") as simulated:
        yield simulated


@pytest.fixture
def probe(card, monkeypatch):
    """Runs a probe as `gpt2.study.probes.kernels` does, with the simulated card's own events for a history."""

    def history(function):
        start = len(card.events)
        function()
        return [
            ["+" if e.action == "alloc" else "-", e.requested_bytes]
            for e in card.events[start:]
            if e.action in ("alloc", "free")
        ]

    monkeypatch.setattr(kernels, "_history", history)
    return lambda name: kernels.probe(MADE[name])


def normal(events):
    """The list with every run of frees sorted."""
    out, frees = [], []
    for sign, size in events:
        if sign == "-":
            frees.append((sign, size))
        else:
            out += [*sorted(frees), (sign, size)]
            frees = []
    return out + sorted(frees)


@pytest.mark.parametrize("name", [name for name in MADE if name not in REFUSED])
def test_allocations_are_those_of_the_card(probe, name):
    got = probe(name)
    for direction in ("forward", "backward"):
        want = RECORDED[name].get(f"again {direction}")
        if want is None:
            continue
        equal = normal(want) == normal(got.get(f"again {direction}", []))
        if (name, direction) in DIFFERENT:
            assert not equal, f"{name} {direction} is equal now: take it off the list"
        else:
            assert equal, f"{name} {direction}\n  card {want}\n  ours {got.get(f'again {direction}')}"


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_whose_size_depends_on_values_is_refused_with_the_line(probe, name):
    with pytest.raises(ValueReadError, match=r"kernels\.py:\d+: .*needs the value of a tensor"):
        probe(name)


def test_every_known_difference_is_a_probe():
    assert {name for name, _ in DIFFERENT} <= set(MADE)


def test_attention_with_fewer_key_heads_is_the_fused_kernels_only_if_the_caller_says_so():
    q, k = torch.randn(8, 8, 256, 64), torch.randn(8, 1, 256, 64)
    took = {}
    with SimulatedGpu("H200", torch="2.11.0") as card:
        q, k = q.to("cuda", torch.bfloat16), k.to("cuda", torch.bfloat16)
        for gqa in (False, True):
            start = len(card.events)
            torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=gqa)
            took[gqa] = [e.requested_bytes for e in card.events[start:] if e.action == "alloc"]
    assert took[False][0] == 4 * q.numel() and took[False][1] == 4 * k.numel()  # recorded: math, in fp32
    assert 4 * q.numel() not in took[True]


def test_isinf_makes_absolute_values_and_a_layer_of_width_one_does_without_cublaslt():
    with SimulatedGpu("H200", torch="2.11.0") as card:
        x, narrow, wide = torch.randn(400, 128, device="cuda"), *(torch.nn.Linear(128, n).cuda() for n in (1, 2))
        took = []
        for call in (lambda: x.isinf(), lambda: narrow(x), lambda: wide(x)):
            start = len(card.events)
            call()
            took.append([e.requested_bytes for e in card.events[start:] if e.action == "alloc"])
    assert took == [[4 * x.numel(), x.numel()], [1600, 33_554_432], [3200, 1_048_576]]


def test_batch_norm_of_channels_last_images_splits_its_rows(card):
    """As recorded for the first norm of ResNet-50 in bf16 (traces/resnet50-last-bf16.json.gz)."""
    norm = torch.nn.BatchNorm2d(64).cuda()
    x = torch.empty(16, 64, 112, 112, device="cuda", dtype=torch.bfloat16, memory_format=torch.channels_last)
    start = len(card.events)
    y = norm(x.requires_grad_())
    middle = len(card.events)
    y.backward(torch.empty_like(y))
    forward, backward = (
        [e.requested_bytes for e in part if e.action == "alloc"]
        for part in (card.events[start:middle], card.events[middle:])
    )
    assert forward[-5:] == [25_690_112, 256, 256, 131_072, 8]
    assert backward[1:] == [256, 256, 256, 256, 65_536, 8, 25_690_112]
