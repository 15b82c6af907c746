"""Ask cuDNN itself, on a real GPU, how much workspace and reserve recurrent nets take: random nets, thousands a second.

cudnnGetRNNTempSpaceSizes answers without running anything. The answers are the evidence behind
gpt2/memory/kernels/recurrent_sizes.py, and this program says how many of them the rules there give. Run by
`make measure`.
"""

from __future__ import annotations

import ctypes
import gzip
import io
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from gpt2.memory.kernels.recurrent_sizes import SMALL, STANDARD, STATIC, Net, reserve, workspace
from gpt2.study.words import no_gpu, parser

ALGORITHMS = {STANDARD: 0, STATIC: 1, SMALL: 3}  # cudnnRNNAlgo_t
CELLS = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t
DTYPES = {"float32": (0, 4), "float64": (1, 8), "float16": (2, 2), "bfloat16": (9, 2)}  # cudnnDataType_t, bytes
FIELDS = ("kind", "T", "B", "I", "H", "L", "D", "P", "dtype", "tokens", "dropout")
COLUMNS = (*FIELDS, "algorithm", "training_bytes", "inference_bytes", "reserve_bytes", "weight_count")
ASKED, WRITTEN = 40_000, 1_600
MOST = 2**26  # elements of the largest tensor


@dataclass
class Question:
    net: Net
    algorithm: str
    lengths: list[int]


def questions(count: int, seed: int = 7) -> Iterator[Question]:
    """Random nets, the same in every run; sizes are spread evenly over their powers of two."""
    pick = random.Random(seed)
    while count:
        T, B, I, H = (int(2 ** pick.uniform(0, power)) for power in (10, 8.5, 10.5, 10.7))  # noqa: E741
        T = pick.choice((T, T, T, T, 127, 128, 129, 255, 256, 257))
        if T * B * max(I, H) > MOST:
            continue
        kind = pick.choice(("lstm", "lstm", "gru", "rnn_tanh", "rnn_relu"))
        dtype = pick.choice(("float32", "float32", "float16", "float16", "bfloat16", "float64"))
        L, D = pick.choice((1, 1, 2, 2, 3, 4, 6)), pick.choice((1, 1, 2))
        net = Net(kind, T, B, I, H, L, D, 0, dtype, DTYPES[dtype][1], dropout=pick.random() < 0.2)
        lengths = [T] * B
        if pick.random() < 0.15:
            lengths = sorted((T, *(pick.randint(1, T) for _ in range(B - 1))), reverse=True)
            net = replace(net, packed=True, tokens=sum(lengths))
        if kind == "lstm" and H > 1 and pick.random() < 0.1:
            net = replace(net, P=pick.randint(1, H - 1))
        known = [STANDARD]
        if not net.packed and not net.P:
            narrow = H <= (384 if kind.startswith("rnn") else 192) and dtype != "float64"
            known += [SMALL] * narrow + [STATIC] * (dtype == "float16" and H <= 1024)
        yield Question(net, pick.choice(known), lengths)
        count -= 1


class Library:
    """cuDNN's functions, with one descriptor of each kind."""

    def __init__(self):
        torch.zeros(1, device="cuda")
        torch.backends.cudnn.version()
        self.cudnn = ctypes.CDLL("libcudnn.so.9")
        self.handle = self._made("cudnnCreate")
        self.net, self.data = self._made("cudnnCreateRNNDescriptor"), self._made("cudnnCreateRNNDataDescriptor")
        self.dropout = {used: self._made("cudnnCreateDropoutDescriptor") for used in (False, True)}
        size = ctypes.c_size_t()
        self._call("cudnnDropoutGetStatesSize", self.handle, ctypes.byref(size))
        self.state = torch.empty(size.value, dtype=torch.uint8, device="cuda")
        for used, state, bytes_ in ((False, None, 0), (True, self.state.data_ptr(), size.value)):
            chance = ctypes.c_float(0.5 if used else 0)
            seed = ctypes.c_ulonglong(1)
            where = (ctypes.c_void_p(state), ctypes.c_size_t(bytes_))
            self._call("cudnnSetDropoutDescriptor", self.dropout[used], self.handle, chance, *where, seed)

    def _call(self, name: str, *args) -> None:
        if status := getattr(self.cudnn, name)(*args):
            raise RuntimeError(f"{name}: status {status}")

    def _made(self, name: str) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made))
        return made

    def sizes(self, question: Question) -> list[int]:
        """Workspace in training and in inference, reserve, elements of the weight buffer."""
        net = question.net
        dtype = DTYPES[net.dtype][0]
        how = (ALGORITHMS[question.algorithm], CELLS[net.kind], 2, net.D - 1, 0, dtype, int(net.dtype == "float64"))
        shape = (int(net.dtype == "float16"), net.I, net.H, net.P or net.H, net.L)
        padded = ctypes.c_uint32(not net.packed)
        self._call("cudnnSetRNNDescriptor_v8", self.net, *how, *shape, self.dropout[net.dropout], padded)
        lengths = (ctypes.c_int * net.B)(*question.lengths)
        layout = (dtype, int(net.packed), net.T, net.B, net.I)
        self._call("cudnnSetRNNDataDescriptor", self.data, *layout, lengths, None)
        space, kept, weights = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudnnGetRNNWeightSpaceSize", self.handle, self.net, ctypes.byref(weights))
        out = []
        for mode in (0, 1):  # inference, training
            where = (ctypes.byref(space), ctypes.byref(kept))
            self._call("cudnnGetRNNTempSpaceSizes", self.handle, self.net, mode, self.data, *where)
            out.append(space.value)
        return [out[1], out[0], kept.value, weights.value // net.itemsize]


def rule(net: Net, algorithm: str) -> list[int]:
    """The same four numbers by gpt2/memory/kernels/recurrent_sizes.py."""
    return [workspace(net, algorithm, True), workspace(net, algorithm, False), reserve(net), net.weights()]


def main(words: list[str] | None = None) -> int:
    """Ask; print how many answers the rules give; write the first of them as a compressed table."""
    options = parser("probes.recurrent_sizes", __doc__)
    options.add_argument("file", help="where to write the table: *.csv.gz")
    options.add_argument("seed", nargs="?", type=int, default=7, help="of the random nets (%(default)s)")
    asked = options.parse_args(words)
    if no_gpu():
        return 2
    library = Library()
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    facts |= {"cudnn": torch.backends.cudnn.version(), "date": time.strftime("%Y-%m-%d"), "seed": asked.seed}
    table = io.StringIO()
    table.writelines(f"# {key}: {value}\n" for key, value in facts.items())
    table.write(",".join(COLUMNS) + "\n")
    equal = refused = 0
    for index, question in enumerate(questions(ASKED, asked.seed)):
        try:
            answer = library.sizes(question)
        except RuntimeError as error:
            refused += 1
            print(f"{question.net} {question.algorithm}: {error}") if refused < 5 else None
            continue
        equal += answer == rule(question.net, question.algorithm)
        if index < WRITTEN:
            values = [getattr(question.net, field) for field in FIELDS]
            row = [int(v) if isinstance(v, bool) else v for v in (*values, question.algorithm, *answer)]
            table.write(",".join(map(str, row)) + "\n")
    print(f"{equal} of {ASKED - refused} answers by the rules, {refused} refused")
    with open(asked.file, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(table.getvalue().encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
