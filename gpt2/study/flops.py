"""What a step computes, counted without a GPU: floating-point operations, and the operators that do work.

FLOPs are counted twice, by PyTorch's own counter over a simulated step and by formula; they must agree. A
multiplication and an addition are two.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gpt2.memory.simulator import SimulatedGpu
from gpt2.model import Size
from gpt2.step import Recipe, Training

_MAKES_NO_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "detach",
                    "lift_fresh", "_local_scalar_dense", "_reshape_alias", "set_", "resize_"}


def forward(size: Size, batch: int, length: int) -> pd.DataFrame:
    """FLOPs of one forward, by formula. Letters: B batch, T length, D width, L layers, V vocabulary.

    Columns: operator, formula, flop_count. What is no matrix product is left out: it is under 1 %.
    """
    B, T, D, L, V = batch, length, size.width, size.layers, size.vocabulary
    rows = [("linear layers of the blocks", "24·L·D²·B·T", 24 * L * D * D * B * T),
            ("attention: q·kᵀ and p·v", "4·L·D·B·T²", 4 * L * D * B * T * T),
            ("lm_head", "2·V·D·B·T", 2 * V * D * B * T)]
    return pd.DataFrame(rows, columns=["operator", "formula", "flop_count"])


def backward(size: Size, batch: int, length: int, *, fused_attention: bool = False) -> int:
    """FLOPs of one backward, by formula: two products for each of forward's, a fifth one for attention that makes its
    scores again."""
    rows = forward(size, batch, length)["flop_count"]
    return 2 * int(rows.sum()) + (int(rows[1]) // 2 if fused_attention else 0)


def model_flops(size: Size, batch: int, length: int) -> int:
    """FLOPs that a step needs, whichever way it is computed: forward three times. The measure of utilisation."""
    return 3 * int(forward(size, batch, length)["flop_count"].sum())


def counted(recipe: Recipe, gpu: str = "H200") -> pd.DataFrame:
    """FLOPs of one simulated step by PyTorch's counter: phase, operator, flop_count."""
    rows = []
    with SimulatedGpu(gpu):
        training = Training(recipe)
        with FlopCounterMode(display=False) as counter:
            training.watch = _reading(lambda: counter.get_flop_counts().get("Global", {}), rows)
            training.step(1)
    table = pd.DataFrame(rows, columns=["phase", "operator", "flop_count"])
    return table.groupby(["phase", "operator"], sort=False, as_index=False).sum()


def operators(recipe: Recipe, gpu: str = "H200") -> pd.DataFrame:
    """The operators of one step that work on the device, counted on a simulated one: phase, operator, call_count.

    Views and empty tensors are left out: they launch nothing. The step is the second, when all state exists.
    """
    rows = []
    with SimulatedGpu(gpu):
        training = Training(recipe)
        training.step(1)
        with _Calls() as calls:
            training.watch = _reading(lambda: calls.seen, rows)
            training.step(2)
    table = pd.DataFrame(rows, columns=["phase", "operator", "call_count"])
    return table.groupby(["phase", "operator"], sort=False, as_index=False).sum()


def _reading(counts, rows: list):
    """A watch that writes down by how much `counts()` grew in each phase."""

    @contextmanager
    def watch(phase: str, step: int):
        before = Counter({str(key): n for key, n in counts().items()})
        yield
        after = Counter({str(key): n for key, n in counts().items()})
        rows.extend((phase, key, n) for key, n in (after - before).items())

    return watch


class _Calls(TorchDispatchMode):
    """Counts operators that launch something on the card."""

    def __init__(self):
        super().__init__()
        self.seen: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _MAKES_NO_KERNEL and not _is_view(func) and _on_card((args, kwargs, out)):
            self.seen[f"aten.{name}"] += 1
        return out


def _is_view(func) -> bool:
    returned = [r.alias_info for r in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _on_card(things) -> bool:
    if isinstance(things, torch.Tensor):
        return things.is_cuda
    if isinstance(things, dict):
        things = things.values()
    return isinstance(things, list | tuple | type({}.values())) and any(_on_card(thing) for thing in things)
