"""Recurrent nets by cuDNN: which algorithm PyTorch asks for, and how many bytes of workspace and reserve that takes.

cuDNN does not publish these sizes. The rules were found in the answers of cuDNN 9.19 on an H200, asked directly for
random nets (gpt2/study/probes/recurrent_sizes.py), and give all of 45,000 answers to the byte: fp32, fp64, fp16 and
bf16; training and inference; one and two directions; packed sequences; projections; dropout. What a part is *for* is a
reading of its size, cuDNN does not say; the counts of parts (8, 6, 4 of one size) and STATIC_COLUMNS are found, not
derived. Other cards and other releases of cuDNN were not asked: they get the same rules.

In short: 8 MiB and a few states per layer and direction, one copy of all weight matrices, and the larger of what the
forward and the backward keep per token. Each part is rounded up to 32 bytes.

Letters: T time, B batch, N tokens, I input width, H hidden width, P projected width, L layers, D directions.
"""

from __future__ import annotations

from dataclasses import dataclass

STANDARD, STATIC, SMALL = "standard", "persist static", "persist static small H"
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
PER_STREAM = 8 * 2**20  # for each layer and direction
STATIC_COLUMNS = 2432  # the least width of the static algorithm's largest buffer, in elements, next to the batch
SHORT_STEPS = 256  # the standard algorithm's gates in one direction: those of so many steps at most


@dataclass(frozen=True)
class Net:
    """A recurrent net and the input of one call. `tokens` is T x B, or fewer if the sequences are packed."""

    kind: str
    T: int
    B: int
    I: int  # noqa: E741
    H: int
    L: int = 1
    D: int = 1
    P: int = 0
    dtype: str = "float32"
    itemsize: int = 4
    packed: bool = False
    tokens: int = 0
    dropout: bool = False

    @property
    def N(self) -> int:
        return self.tokens if self.packed else self.T * self.B

    @property
    def gates(self) -> int:
        return GATES[self.kind]

    @property
    def out(self) -> int:
        """Width of what one direction gives out."""
        return self.P or self.H

    def matrices(self) -> int:
        """Elements of all weight matrices."""
        inputs = self.I + (self.L - 1) * self.D * self.out
        return self.D * (self.gates * self.H * (inputs + self.L * self.out) + self.L * self.P * self.H)

    def weights(self) -> int:
        """Elements of the flat weight buffer: always with both biases of each gate, whether the module has any."""
        return self.matrices() + self.D * self.L * 2 * self.gates * self.H


def algorithm(net: Net, forward: bool, gpu) -> str:
    """The algorithm PyTorch asks for. RNN.cpp, get_algo and its two heuristics."""
    if net.P or net.packed:
        return STANDARD
    plain = net.kind.startswith("rnn")
    widest = (384 if forward else 256) if plain else (192 if forward else 128)
    if net.dtype != "float64" and net.H <= widest:
        return SMALL
    suits = net.L == net.D == 1 and net.H <= 1024 and net.H % 128 == 0 and net.I % 128 == 0
    return STATIC if net.dtype == "float16" and suits and _batch_suits(net, gpu) else STANDARD


def _batch_suits(net: Net, gpu) -> bool:
    """RNN.cpp, use_persist_device_heuristics."""
    T, B = net.T, net.B
    major, minor = gpu.capability
    if major == 7 and minor != 5:
        enough = T >= 40 and B <= 128 or T >= 20 and B <= 96 or T >= 10 and B <= 32
        return (B % 16 == 0 and B not in (80, 112) or B == 8) and enough
    if major < 8 or minor == 6 or gpu.sms < 98 or net.kind == "gru" or B % 8 or B > 128:
        return False
    return net.kind == "lstm" or B < 96 or net.H < 896


def _sum(*sizes: int) -> int:
    """Each rounded up to 32 bytes."""
    return sum(-(-size // 32) * 32 for size in sizes)


def _wavefront(net: Net) -> int:
    """Steps of one layer that the standard algorithm's backward holds at a time when layers run one behind another."""
    steps = next((c for most, c in ((1, 32), (8, 16), (16, 8), (96, 4)) if most >= net.B), 2)
    steps = max(steps, 8) if net.T >= 128 else steps
    return steps * (net.L + max(1, 8 // steps))


def workspace(net: Net, algorithm: str, training: bool) -> int:
    """Bytes of one call; in training forward, input's gradient and weights' gradient take the same.

    bf16 has no persistent kernels: it takes what the standard algorithm does.
    """
    N, L, D, G, item = net.N, net.L, net.D, net.gates, net.itemsize
    lstm = net.kind == "lstm"
    token, hidden, state = net.H * item, L * D * net.B * net.H * item, L * D * net.B * net.out * item
    base = PER_STREAM * L * D + 256 + _sum(net.matrices() * item)
    forward = backward = 0
    if not net.packed:  # input and output in packed order, the states in the order of the lengths
        cells = 1 if lstm else 0
        base += _sum(8 * net.B)
        forward += _sum(N * net.I * item, N * D * net.out * item) + 2 * (_sum(state) + cells * _sum(hidden))
        backward += 2 * _sum(N * net.I * item, N * D * net.out * item) + 4 * (_sum(state) + cells * _sum(hidden))
    if D == 2:
        base += _sum(4 * L * net.B * token)
    if net.P:
        base += _sum(N * D * token)
    if D == 2 or net.dropout:
        forward += _sum(N * D * D * token)
    backward += _sum(N * max(net.I, net.H) * D * D * item)
    if algorithm == STANDARD or net.dtype == "bfloat16":
        steps = N if D == 2 else min(N, SHORT_STEPS * net.B)
        forward += _sum(steps * D * G * token, *((4 * hidden, 2 * hidden) if lstm else (G * hidden,)))
        layers = N * D if L == 1 else N * D * D if D == 2 else min(N, _wavefront(net) * net.B)
        backward += _sum(layers * token, *((2 * hidden, hidden) if lstm else (hidden,)))
    else:
        base += _sum(2 * L * net.B * token, 2 * hidden if lstm else 0)
        forward += _sum(4 * G * N * token, D * G * N * token)
        large = _sum(8 * N * token)
        if algorithm == STATIC:
            large = max(large, _sum(STATIC_COLUMNS * net.H * item + net.B * token))
        small = {"lstm": 4, "gru": 6}.get(net.kind, 1)
        backward += large + _sum(small * N * token, (D if L == 1 else 2 * D) * N * token)
    return base + (max(forward, backward) if training else forward)


def reserve(net: Net) -> int:
    """Bytes kept from forward to backward: gates and cells of each layer, what layers hand on.

    Dropout adds a bit for each element handed on, of packed sequences too for all T x B.
    """
    layer = net.N * net.D * net.H * net.itemsize
    kept = {"lstm": (4, 1), "gru": (6,)}.get(net.kind, (1,))
    size = 256 + _sum(*(net.L * layer * part for part in kept), (net.L - 1) * layer)
    if net.P:
        size += _sum(net.L * layer, net.L * net.N * net.D * net.P * net.itemsize)
    if net.dropout:
        size += (net.L - 1) * net.D * _sum(-(-net.T * net.B * net.D * net.out // 8))
    return size
