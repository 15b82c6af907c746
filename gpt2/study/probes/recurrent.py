"""Recurrent nets one by one on a real GPU: what does each take, in which order?

Each net runs forward and backward, then forward again for evaluation, with PyTorch's memory history on. The rows are
the evidence behind gpt2/memory/operators/recurrent.py. Run by `make measure`.

Letters: T time, B batch, I input width, H hidden width, P projected width, L layers, D directions.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.utils import rnn

from gpt2.study.probes import runs
from gpt2.study.words import no_gpu, parser

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("LSTM", "GRU", "RNN")
SMALL = {"T": 20, "B": 8, "I": 64, "H": 96, "L": 1, "D": 1, "dtype": "fp32"}


def _lines(kind: str) -> Iterator[dict]:
    """One net, one size after another changed."""
    base = {"T": 64, "B": 8, "I": 256, "H": 512, "L": 1, "D": 1, "dtype": "fp32"}
    vary = {
        "T": (1, 2, 8, 16, 32, 50, 100, 128, 256, 512),
        "B": (1, 2, 3, 4, 5, 16, 20, 32, 64, 128, 256),
        "I": (1, 10, 32, 64, 100, 128, 300, 512, 768, 1024),
        "L": (2, 3, 4),
        "D": (2,),
        "dtype": ("bf16", "fp16"),
        "H": (10, 16, 32, 64, 100, 128, 160, 200, 256, 300, 384, 640, 650, 768, 1024, 1500, 2048),
    }
    for other in ({}, {"L": 2}, {"dtype": "bf16"}, {"dtype": "fp16"}, {"H": 128, "B": 32}, {"D": 2, "L": 2}):
        start = base | other
        yield {"kind": kind} | start
        for key, values in vary.items():
            for value in values if not other or key in ("H", "B", "T") else ():
                yield {"kind": kind} | start | {key: value}


def _ways(kind: str) -> Iterator[dict]:
    """The ways in which people call one."""
    ways: list[dict] = [
        {"L": 2, "dropout": 0.5},
        {"L": 2, "dropout": 0.5, "dtype": "bf16"},
        {"L": 2, "packed": True},
        {"L": 2, "packed": True, "dropout": 0.5},
        {"D": 2, "packed": True, "batch_first": True},
        {"H": 300, "packed": True, "auto": "bf16"},
        {"L": 2, "auto": "bf16"},
        {"H": 512, "I": 256, "auto": "fp16"},
        {"L": 2, "D": 2, "auto": "bf16", "batch_first": True},
        {"L": 2, "bias": False},
        {"L": 2, "bias": False, "dtype": "bf16"},
        {"L": 2, "batch_first": True},
        {"input_grad": False},
        {"input_grad": False, "state": True},
        {"use": "state"},
        {"H": 1024, "I": 128, "L": 2, "dtype": "fp16"},
        {"H": 160, "D": 2, "dtype": "fp16"},
        {"H": 160, "L": 2, "D": 2},
    ]
    if kind == "LSTM":
        ways += [{"P": 32} | way for way in ({}, {"L": 2, "D": 2}, {"bias": False}, {"dtype": "bf16"})]
        ways += [{"P": 32} | way for way in ({"auto": "bf16"}, {"packed": True}, {"L": 2, "dropout": 0.5})]
    for way in ways:
        yield {"kind": kind} | SMALL | way


def nets() -> Iterator[dict]:
    """Every net, each once."""
    seen = set()
    for kind in KINDS:
        for row in (*_lines(kind), *_ways(kind)):
            key = json.dumps(row, sort_keys=True)
            if key not in seen:
                seen.add(key)
                yield row


def _module(row: dict) -> nn.RNNBase:
    options = {key: row[key] for key in ("dropout", "bias", "batch_first") if key in row}
    options |= {"proj_size": row["P"]} if "P" in row else {}
    net = getattr(nn, row["kind"])(row["I"], row["H"], row["L"], bidirectional=row["D"] == 2, **options)
    return net.cuda().to(DTYPES[row["dtype"]])


def _state(row: dict):
    sizes = (row["L"] * row["D"], row["B"], row["H"])
    zeros = [torch.zeros(sizes, device="cuda", dtype=DTYPES[row["dtype"]]) for _ in range(2)]
    return tuple(zeros) if row["kind"] == "LSTM" else zeros[0]


def passes(row: dict) -> Iterator[tuple[str, Callable]]:
    """Forward, backward, and the forward of an evaluation, which keeps nothing."""
    net, dtype = _module(row), DTYPES[row["dtype"]]
    T, B = row["T"], row["B"]
    sizes = (B, T) if row.get("batch_first") else (T, B)
    x = torch.full((*sizes, row["I"]), 0.1, device="cuda", dtype=dtype, requires_grad=row.get("input_grad", True))
    given = (_state(row),) if "state" in row else ()
    autocast = torch.autocast("cuda", DTYPES[row["auto"]]) if "auto" in row else contextlib.nullcontext()
    lengths = [max(1, T - (i * T) // (2 * B)) for i in range(B)]
    kept = []

    def forward():
        with autocast:
            inputs = rnn.pack_padded_sequence(x, lengths, row.get("batch_first", False)) if "packed" in row else x
            out, state = net(inputs, *given)
        if row.get("use") == "state":
            out = state[0] if row["kind"] == "LSTM" else state
        kept.append(out.data if "packed" in row else out)

    yield "forward", forward
    gradient = torch.ones_like(kept[0])
    yield "backward", lambda: kept.pop().backward(gradient)
    net.eval()

    def evaluate():
        with torch.no_grad():
            forward()

    yield "evaluation", evaluate


def probe(row: dict) -> dict:
    """The row with the history of each pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # weights that are not one chunk; lower precision
        return row | {name: runs.history(function) for name, function in passes(row)}


def main(words: list[str] | None = None) -> int:
    """Write {"gpu": ..., "rows": [...]} as compressed JSON."""
    options = parser("probes.recurrent", __doc__)
    options.add_argument("file", help="where to write the rows: *.json.gz")
    path = options.parse_args(words).file
    if no_gpu():
        return 2
    torch.cuda.init()
    document = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%d"),
        "rows": [probe(row) for row in nets()],
    }
    with open(path, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(json.dumps(document, separators=(",", ":")).encode())
    print(f"{len(document['rows'])} recurrent nets")
    return 0


if __name__ == "__main__":
    sys.exit(main())
