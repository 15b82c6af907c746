"""What `x[i]`, `x[mask]` and assigning to them take on the card, and what stays known of the contents."""

import json
from pathlib import Path

import pytest
import torch

from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.values import ValueReadError

RECORDING = Path(__file__).parents[1] / "results/measured/h200/kernel-probes.json"
PROBES = json.loads(RECORDING.read_text("utf-8"))["probes"]


@pytest.fixture(scope="module")
def card():
    with SimulatedGpu("H200", torch="2.11.0") as simulated:
        yield simulated


@pytest.fixture
def events(card):
    """Calls a function; what it allocated and freed, as the recorded probes have it."""

    def heard(function):
        start = len(card.events)
        result = function()
        return result, [
            ["+" if e.action == "alloc" else "-", e.requested_bytes]
            for e in card.events[start:]
            if e.action in ("alloc", "free")
        ]

    return heard


def test_a_mask_as_index_takes_what_it_took_on_a_real_card(events):
    x = torch.randn(4096, 500, device="cuda", requires_grad=True)
    found = PROBES["bool index"]["first forward"][4][1] // 8  # the recorded mask had so many True
    kept = (torch.arange(4096) < found).long().cuda() * 7
    gradient = torch.zeros(found, 500, device="cuda")
    y, forward = events(lambda: x[kept > 5])
    _, backward = events(lambda: y.backward(gradient))
    assert forward == PROBES["bool index"]["first forward"]
    assert backward == PROBES["bool index"]["first backward"]


def test_nonzero_takes_what_it_took_on_a_real_card(events):
    mask = (torch.arange(100_000) < PROBES["nonzero"]["first forward"][3][1] // 8).long().cuda()
    table, took = events(lambda: mask.nonzero())
    assert took == PROBES["nonzero"]["first forward"]
    assert table.stride() == (1, table.shape[0]) and table[5].tolist() == [5]


def test_a_number_assigned_by_position_or_mask_takes_nothing_by_indices_one_element(events):
    x = torch.randn(64, 64, device="cuda")
    i, mask = torch.arange(5, device="cuda"), torch.ones(64, 64, dtype=torch.bool, device="cuda")

    def took(*index, value=1.0):
        return events(lambda: x.__setitem__(index if len(index) > 1 else index[0], value))[1]

    for index in ((0,), (0, 0), (slice(1, 3),), (..., 0), (slice(None),), (mask,), (slice(None), mask[0])):
        assert took(*index) == [], index
    assert took(i) == took(i, i) == took(slice(None), i) == took(i, value=7) == [["+", 4], ["-", 4]]
    assert took([0, 1, 2]) == [["+", 24], ["+", 4], ["-", 4], ["-", 24]]
    assert events(lambda: x.masked_fill_(mask, 0.0))[1] == []
    assert took(torch.arange(5)) == [["+", 4], ["+", 40], ["-", 40], ["-", 4]]


def test_indices_that_are_laid_out_differently_are_copied(events):
    x, i, j = torch.randn(64, 64, device="cuda"), torch.arange(5, device="cuda"), torch.arange(7, device="cuda")
    y, took = events(lambda: x[i[:, None], j[None, :]])
    assert y.shape == (5, 7)
    assert took == [["+", 280], ["+", 280], ["+", 140], ["-", 280], ["-", 280]]


def test_assigned_numbers_are_known_and_unknown_ones_are_not(card):
    x = torch.zeros(4, dtype=torch.int64, device="cuda")
    x[1:3], x[torch.tensor([3], device="cuda")] = 5, 6
    assert x.tolist() == [0, 5, 5, 6]
    x[x == 5] = 1
    assert x.tolist() == [0, 1, 1, 6]
    x[0] = torch.randn(3, device="cuda").argmax().item()
    with pytest.raises(ValueReadError):
        bool((x > 0).all())


def test_a_mask_nobody_knows_may_be_written_by_but_not_read_by(card):
    x = torch.randn(64, 3, device="cuda")
    x[x > 0] = 0.0
    x[x[:, 0] > 0] = torch.zeros(3, device="cuda")
    with pytest.raises(ValueReadError, match=r"test_indexing\.py:\d+: indexing with a mask"):
        x[x > 0]


def test_a_list_as_index_is_a_tensor_of_the_card_that_autograd_keeps(card, events):
    x = torch.randn(64, 300, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    y, forward = events(lambda: x[:, [-1, 0]])
    assert forward == [["+", 16], ["+", 512]] and torch.cuda.memory_allocated() == before + 1024
    assert x[[0, 1, 2]].shape == (3, 300) and x[[True] * 60 + [False] * 4].shape == (60, 300)
    assert x[[]].shape == (0, 300) and x[[0, 1], [2, 3]].shape == (2,) and x[..., [-2], None].shape == (64, 1, 1)
    x.detach()[[0, 1], 3:] = 1.0


def test_what_a_list_chooses_of_known_contents_is_known(card):
    tokens = torch.arange(12).view(3, 4).cuda()
    assert tokens[:, [-1, 0]].tolist() == [[3, 0], [7, 4], [11, 8]] and 8 in tokens[:, [0]] and 9 not in tokens[[0, 1]]
    tokens[[0, 2]] = 5
    assert tokens.tolist() == [[5] * 4, [4, 5, 6, 7], [5] * 4]


def test_a_host_number_takes_the_type_and_the_device_of_a_tensor_of_the_card(card, events):
    like = torch.zeros(3, dtype=torch.int64, device="cuda")
    number, forward = events(lambda: torch.tensor(5.0).type_as(like))
    assert number.is_cuda and number.dtype is torch.int64 and forward == [["+", 8]]


def test_one_hot_scatters_into_zeros_and_its_width_may_be_known(card, events):
    classes = torch.tensor([1, 0, 3]).cuda()
    found, took = events(lambda: torch.nn.functional.one_hot(classes, 4))
    assert took == [["+", 96]] and found.dtype is torch.int64
    assert torch.nn.functional.one_hot(classes).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]]
