"""A program's own meta tensors while a GPU is simulated: they stay on meta and cost nothing."""

import copy

import pytest
import torch
from torch import nn

from gpt2.memory.simulator import SimulatedGpu


@pytest.fixture
def card():
    with SimulatedGpu("A40") as simulated:
        yield simulated


def on_meta(tensor):
    return tensor.device.type == "meta" and tensor.is_meta and not tensor.is_cuda and not tensor.is_cpu


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2**30, device="meta"),
        lambda: torch.zeros(2**30, device=torch.device("meta"), dtype=torch.int64),
        lambda: torch.tensor([1.0, 2.0], device="meta"),
        lambda: torch.empty_like(torch.ones(3), device="meta"),
        lambda: torch.zeros_like(torch.ones(3, device="cuda"), device="meta"),
        lambda: torch.ones(3).to("meta"),
        lambda: torch.ones(100_000).to("meta"),
        lambda: torch.ones(3).cuda().to(device="meta", dtype=torch.float16),
        lambda: torch.empty(4, 4, device="meta") @ torch.empty(4, 4, device="meta"),
        lambda: torch.empty(4, 4, device="meta").sum(0)[None].clone(),
        lambda: torch.empty(4, device="meta").chunk(2)[1],
        lambda: copy.deepcopy(torch.empty(4, device="meta")),
        lambda: nn.Parameter(torch.empty(4, device="meta")),
        lambda: nn.Linear(4, 4, device="meta").weight,
        lambda: nn.Linear(4, 4).to("meta").weight,
        lambda: torch.empty_like(torch.empty(4, device="meta")),
    ],
)
def test_every_way_to_meta_arrives_there_and_costs_nothing(card, make):
    before = torch.cuda.memory_stats()["allocation.all.current"]
    tensor = make()
    assert on_meta(tensor) and "meta" in repr(tensor)
    assert torch.cuda.memory_stats()["allocation.all.current"] == before == 0


def test_a_module_made_on_meta_gets_memory_by_to_empty(card):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000))
        assert on_meta(model(torch.empty(8, 1000)))
    assert all(map(on_meta, [*model.parameters(), *model.buffers()])) and torch.cuda.memory_allocated() == 0
    with pytest.raises(NotImplementedError, match="to_empty"):
        model.to("cuda")
    model.to_empty(device="cuda")
    assert all(t.is_cuda and not t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert torch.cuda.memory_allocated() == 4_000_256 + 5 * 4_096 + 512
    out = model(torch.zeros(8, 1000, device="cuda"))
    assert out.is_cuda and not torch.empty_like(out).is_meta


def test_transformers_models_are_made_on_meta(card):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100, n_positions=32)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    assert all(map(on_meta, model.parameters())) and torch.cuda.memory_allocated() == 0
    weights = GPT2LMHeadModel(config).cuda().state_dict()
    model.load_state_dict(weights, assign=True)
    assert all(p.is_cuda for p in model.parameters())


def test_a_default_device_does_not_make_the_card_meta(card):
    with torch.device("cuda"):
        linear = nn.Linear(3, 4).to("cuda").to(torch.device("cuda", 0), torch.float16)
        assert linear.weight.device.type == "cuda" and linear.weight.dtype is torch.float16
        assert torch.ones(3).to("meta").device.type == "meta"
        assert torch.ones(3, device="cpu").to("cuda").device.type == "cuda"
        assert torch.ones(3).to(linear.weight).device.type == "cuda"


def test_what_is_empty_is_on_the_card_and_grows_there(card):
    tensor = torch.empty(0, device="cuda")
    assert tensor.is_cuda and torch.cuda.memory_allocated() == 0
    assert torch.cat([tensor, torch.ones(3, device="cuda")]).is_cuda
    tensor.resize_(1000)
    assert tensor.is_cuda and torch.cuda.memory_allocated() == 4_096


def test_meta_is_as_before_once_the_card_is_gone():
    made = torch.empty, torch.Tensor.to, torch.utils._device.DeviceContext.__torch_function__
    with SimulatedGpu("A40"):
        kept = torch.empty(3, device="meta")
    assert made == (torch.empty, torch.Tensor.to, torch.utils._device.DeviceContext.__torch_function__)
    assert on_meta(kept) and on_meta(kept + 1)
