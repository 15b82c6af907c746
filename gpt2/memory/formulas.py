"""The study's arithmetic: how large each tensor of a step must be, as data that carries its formula.

Pure Python, no tensors: a knob turned is an answer at once. Letters of the formulas: L layers, D width, H heads,
V vocabulary, C context, P parameters, B batch, T length; numbers are of elements, times the bytes of one.

Sources: "Where training memory goes" (blocks, vocabulary-sized tensors, fixed part, calculator, straight line) and
"Anatomy of one GPU training step" (16 bytes per parameter, 34·s·b·h, worked example). The formulas are for fp32 with
explicit attention unless they say otherwise. A test holds them against the simulated ledger, byte for byte.
"""

from __future__ import annotations

from math import floor
from typing import NamedTuple, Protocol

from gpt2.memory.trace import Category

MIB = 2**20
FP32, BOOL, INT64 = 4, 1, 8  # bytes of one element
CUBLAS_WORKSPACE_BYTES = 8_519_680  # per thread; 33,554,432 on compute capability 9.0
PUBLISHED_SLACK_BYTES = round(5.8 * MIB)  # "about 5.8 MiB more block space than requested", batch 8 on the A40


class Widths(Protocol):
    """What a model's size must say; `gpt2.model.Size` does."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int


class Entry(NamedTuple):
    """One kind of tensor that a step holds, and the formula for its size."""

    name: str
    category: Category
    numel: int
    bytes_each: int
    formula: str

    @property
    def bytes(self) -> int:
        """Requested bytes, before the allocator's rounding."""
        return self.numel * self.bytes_each


def total(entries: list[Entry]) -> int:
    """Bytes of all entries together."""
    return sum(entry.bytes for entry in entries)


# --- what the model owns --------------------------------------------------------------------------------------------


def block_parameters(size: Widths) -> int:
    """Trained numbers of one block: four matrices of 12·D² in all, their biases 9·D, two norms 4·D."""
    return 12 * size.width**2 + 13 * size.width


def parameters(size: Widths) -> int:
    """Trained numbers of the model; the head is the token embedding and counts once."""
    L, D, V, C = size.layers, size.width, size.vocabulary, size.context
    return V * D + C * D + L * block_parameters(size) + 2 * D


def states(size: Widths) -> list[Entry]:
    """Weights, gradients and Adam's two moments in fp32: 16 bytes per parameter while all exist."""
    P = parameters(size)
    return [Entry("weights", Category.PARAMETERS, P, FP32, "P"),
            Entry("gradients", Category.GRADIENTS, P, FP32, "P"),
            Entry("Adam m", Category.OPTIMIZER, P, FP32, "P"),
            Entry("Adam v", Category.OPTIMIZER, P, FP32, "P")]


def fixed(size: Widths, batch: int, length: int, workspace_bytes: int = CUBLAS_WORKSPACE_BYTES) -> list[Entry]:
    """What is there between two steps: weights, moments, masks, the token buffer, two threads' workspaces."""
    L, C = size.layers, size.context
    return [entry for entry in states(size) if entry.category is not Category.GRADIENTS] + [
        Entry("causal masks", Category.INPUTS, L * C * C, FP32, "L·C²"),
        Entry("tokens and targets", Category.INPUTS, batch * (length + 1), INT64, "B·(T + 1)"),
        Entry("cuBLAS workspaces", Category.WORKSPACE, 2 * workspace_bytes, 1, "2·W")]


# --- what a step makes -----------------------------------------------------------------------------------------------


def block_saved(size: Widths, batch: int, length: int) -> list[Entry]:
    """What one block keeps for backward, explicit attention, fp32: the published table, tensor by tensor.

    The published row of the combined query, key and value is here what is really kept: the copies of q, k and v that
    the batched products want in one piece. Their size is the same.
    """
    B, T, D, H = batch, length, size.width, size.heads
    BTD = B * T * D

    def kept(name, numel, formula, bytes_each=FP32):
        return Entry(name, Category.ACTIVATIONS, numel, bytes_each, formula)

    return [
        kept("LayerNorm 1 input", BTD, "B·T·D"), kept("LayerNorm 1 output", BTD, "B·T·D"),
        kept("LayerNorm 1 mean and 1/std", 2 * B * T, "2·B·T"),
        kept("q, k and v, each in one piece", 3 * BTD, "3·B·T·D"),
        kept("causal mask comparison", T * T, "T²", BOOL),
        kept("attention probabilities", B * H * T * T, "B·H·T²"),
        kept("attention output, before projection", BTD, "B·T·D"),
        kept("LayerNorm 2 input", BTD, "B·T·D"), kept("LayerNorm 2 output", BTD, "B·T·D"),
        kept("LayerNorm 2 mean and 1/std", 2 * B * T, "2·B·T"),
        kept("MLP hidden, before GELU", 4 * BTD, "4·B·T·D"), kept("MLP hidden, after GELU", 4 * BTD, "4·B·T·D")]


def ends_saved(size: Widths, batch: int, length: int) -> list[Entry]:
    """What is kept outside the blocks: positions, the final LayerNorm's input and output, and what the loss needs."""
    BTD = batch * length * size.width

    def kept(name, numel, formula, bytes_each=FP32):
        return Entry(name, Category.ACTIVATIONS, numel, bytes_each, formula)

    return [kept("positions", length, "T", INT64),
            kept("final LayerNorm input", BTD, "B·T·D"), kept("final LayerNorm output", BTD, "B·T·D"),
            kept("final LayerNorm mean and 1/std", 2 * batch * length, "2·B·T"),
            kept("targets in one piece", batch * length, "B·T", INT64),
            kept("weight of the mean", 1, "1"), kept("loss", 1, "1")]


def saved(size: Widths, batch: int, length: int) -> list[Entry]:
    """All that forward keeps for backward, the loss's vocabulary-sized tensors apart; blocks taken together."""
    L = size.layers
    blocks = [entry._replace(numel=L * entry.numel, formula=f"L·{entry.formula}")
              for entry in block_saved(size, batch, length)]
    return blocks + ends_saved(size, batch, length)


def vocabulary_sized(size: Widths, batch: int, length: int) -> list[Entry]:
    """The four tensors of B·T·V that are alive together at the start of backward, while `logits` keeps its name."""
    names = ("logits", "log-probabilities", "gradient of the log-probabilities", "gradient of the logits")
    return [Entry(name, Category.LOSS, batch * length * size.vocabulary, FP32, "B·T·V") for name in names]


def peak(size: Widths, batch: int, length: int, workspace_bytes: int = CUBLAS_WORKSPACE_BYTES) -> list[Entry]:
    """What is alive when backward's log-softmax asks for the gradient of the logits; slack is not in it.

    The loss's own backward is over by then: it has given back the targets and the weight of the mean.
    """
    used = ("targets in one piece", "weight of the mean")
    return [*fixed(size, batch, length, workspace_bytes),
            *(entry for entry in saved(size, batch, length) if entry.name not in used),
            *vocabulary_sized(size, batch, length),
            Entry("gradient of the loss", Category.TEMPORARIES, 1, FP32, "1")]


# --- the published closed forms --------------------------------------------------------------------------------------


def calculator(size: Widths, batch: int, length: int) -> list[Entry]:
    """The first article's calculator: a fixed part, blocks split into T and T², the two ends, four logits.

    Within 13 MiB of all four published peaks (batch 8, 16, 18, 20), which a test repeats.
    """
    L, D, H, V, C = size.layers, size.width, size.heads, size.vocabulary, size.context
    B, T, P = batch, length, parameters(size)
    bytes_fixed = 12 * P + 4 * L * C * C + 2 * CUBLAS_WORKSPACE_BYTES + PUBLISHED_SLACK_BYTES
    return [
        Entry("model, Adam, masks, workspaces", Category.PARAMETERS, bytes_fixed, 1, "12·P + 4·L·C² + 2·W + slack"),
        Entry("layer activations", Category.ACTIVATIONS, (16 * L + 2) * B * T * D, FP32, "(16·L + 2)·B·T·D"),
        Entry("causal mask comparisons", Category.ACTIVATIONS, L * T * T, BOOL, "L·T²"),
        Entry("attention probabilities", Category.ACTIVATIONS, L * B * H * T * T, FP32, "L·B·H·T²"),
        Entry("vocabulary-sized tensors", Category.LOSS, 4 * B * T * V, FP32, "4·B·T·V")]


def reserved_estimate(allocated_bytes: int, ratio: float = 44_948 / 40_375) -> int:
    """The calculator's reserved memory: 11 % above allocated, the published gap between two peaks. A heuristic."""
    return round(allocated_bytes * ratio)


def bytes_per_sequence(peak_bytes: float, fixed_bytes: float, batch: int) -> float:
    """Slope of the straight line through the fixed part and one measured peak."""
    return (peak_bytes - fixed_bytes) / batch


def straight_line_batch(free_bytes: float, fixed_bytes: float, per_sequence_bytes: float) -> int:
    """The largest batch that a straight line of allocated bytes lets into `free_bytes`. The card says less."""
    return max(0, floor((free_bytes - fixed_bytes) / per_sequence_bytes))


def layer_16bit(size: Widths, batch: int, length: int) -> int:
    """Bytes one layer keeps in 16-bit precision, attention scores apart: 34·s·b·h, the second article's rule."""
    return 34 * length * batch * size.width


def worked_example(size: Widths, batch: int, length: int) -> list[Entry]:
    """The second article's estimate: 16 bytes per parameter, 34·s·b·h per layer, fp32 logits and their gradient.

    It counts 12·L·D² + V·D parameters, without positions, biases and norms.
    """
    L, D, V = size.layers, size.width, size.vocabulary
    P, layers = 12 * L * D * D + V * D, L * layer_16bit(size, batch, length)
    return [Entry("weights, gradients, two moments", Category.PARAMETERS, P, 16, "12·L·D² + V·D"),
            Entry("activations of the layers", Category.ACTIVATIONS, layers, 1, "L·34·s·b·h"),
            Entry("logits", Category.LOSS, batch * length * V, FP32, "B·T·V"),
            Entry("gradient of the logits", Category.LOSS, batch * length * V, FP32, "B·T·V")]


def update_traffic(parameter_count: int) -> int:
    """Bytes AdamW moves per update, fp32: reads weight, gradient, two moments, writes all but the gradient: 28·P."""
    return 28 * parameter_count
