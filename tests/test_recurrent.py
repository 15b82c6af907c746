"""Recurrent nets on a simulated H200 against a real one: cuDNN's own answers, and every allocation of whole calls.

The recordings are results/measured/h200/recurrent-sizes.csv.gz (gpt2/study/probes/recurrent_sizes.py) and
recurrent-probes.json.gz (gpt2/study/probes/recurrent.py): torch 2.11.0+cu130, cuDNN 9.19.
"""

import csv
import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from gpt2.memory.kernels.recurrent_sizes import SMALL, STANDARD, STATIC, Net, algorithm
from gpt2.memory.simulator import SimulatedGpu
from gpt2.study.probes import recurrent
from gpt2.study.probes.recurrent_sizes import DTYPES, rule

MEASURED = Path(__file__).parents[1] / "results/measured/h200"
ROWS = json.loads(gzip.decompress((MEASURED / "recurrent-probes.json.gz").read_bytes()))["rows"]
PASSES = ("forward", "backward", "evaluation")
DROPOUT_STATE = [8, -8, 6_488_064]  # made for the first call with dropout in a process


def answers():
    """(net, algorithm, what cuDNN answered) of each row of the table."""
    lines = gzip.decompress((MEASURED / "recurrent-sizes.csv.gz").read_bytes()).decode().splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        sizes = {key: int(row[key]) for key in ("T", "B", "I", "H", "L", "D", "P", "tokens")}
        more = {"packed": sizes["tokens"] > 0, "dropout": row["dropout"] == "1", "itemsize": DTYPES[row["dtype"]][1]}
        net = Net(row["kind"], dtype=row["dtype"], **sizes, **more)
        columns = ("training_bytes", "inference_bytes", "reserve_bytes", "weight_count")
        yield net, row["algorithm"], [int(row[column]) for column in columns]


def test_every_answer_of_cudnn_is_given_by_the_rules():
    table = list(answers())
    assert len(table) == 1600
    assert {name for _, name, _ in table} == {STANDARD, STATIC, SMALL}
    wrong = [(net, name, want, rule(net, name)) for net, name, want in table if rule(net, name) != want]
    assert not wrong, f"{len(wrong)} of {len(table)}: {wrong[:3]}"


def normal(sizes):
    """The list with every run of frees sorted, and without the dropout state."""
    at = next((i for i in range(len(sizes)) if sizes[i : i + 3] == DROPOUT_STATE), None)
    sizes = sizes if at is None else sizes[:at] + sizes[at + 3 :]
    out, frees = [], []
    for size in sizes:
        if size < 0:
            frees.append(size)
        else:
            out += [*sorted(frees), size]
            frees = []
    return out + sorted(frees)


@pytest.mark.parametrize("kind", recurrent.KINDS)
def test_allocations_of_whole_calls_are_those_of_the_card(kind, monkeypatch):
    wrong = []
    with SimulatedGpu("H200", torch="2.11.0") as card:

        def history(function):
            start = len(card.events)
            function()
            signs = {"alloc": 1, "free": -1}
            return [signs[e.action] * e.requested_bytes for e in card.events[start:] if e.action in signs]

        monkeypatch.setattr(recurrent.runs, "history", history)
        for row in ROWS:
            if row["kind"] == kind:
                net = {key: value for key, value in row.items() if key not in PASSES}
                got = recurrent.probe(net)
                wrong += [(net, name) for name in PASSES if normal(got[name]) != normal(row[name])]
    assert not wrong, f"{len(wrong)}: {wrong[:5]}"


def test_rows_are_those_of_the_program():
    assert [{k: v for k, v in row.items() if k not in PASSES} for row in ROWS] == list(recurrent.nets())


def test_the_dropout_state_is_made_once():
    recorded = next(row["forward"] for row in ROWS if "dropout" in row)
    assert recorded[2:5] == DROPOUT_STATE
    with SimulatedGpu("H200", torch="2.11.0") as card:
        net, x = nn.LSTM(64, 96, 2, dropout=0.5).cuda(), torch.zeros(20, 8, 64, device="cuda")
        for _ in range(2):
            net(x)
        states = [e for e in card.events if e.action == "alloc" and e.requested_bytes == DROPOUT_STATE[-1]]
    assert len(states) == 1


@pytest.mark.parametrize(
    ("gpu", "net", "forward", "backward"),
    [
        ("H200", Net("lstm", 64, 8, 256, 192), SMALL, STANDARD),
        ("H200", Net("rnn_tanh", 64, 8, 256, 256), SMALL, SMALL),
        ("H200", Net("lstm", 64, 8, 256, 96, dtype="float64", itemsize=8), STANDARD, STANDARD),
        ("H200", Net("lstm", 64, 8, 256, 96, packed=True, tokens=100), STANDARD, STANDARD),
        ("H200", Net("lstm", 64, 8, 256, 512, dtype="float16", itemsize=2), STATIC, STATIC),
        ("H200", Net("gru", 64, 8, 256, 512, dtype="float16", itemsize=2), STANDARD, STANDARD),
        ("A40", Net("lstm", 64, 8, 256, 512, dtype="float16", itemsize=2), STANDARD, STANDARD),
        ("T4", Net("lstm", 64, 8, 256, 512, dtype="float16", itemsize=2), STANDARD, STANDARD),
    ],
)
def test_the_algorithm_is_the_one_pytorch_asks_for(gpu, net, forward, backward):
    with SimulatedGpu(gpu, torch="2.11.0") as card:
        assert (algorithm(net, True, card.gpu), algorithm(net, False, card.gpu)) == (forward, backward)
