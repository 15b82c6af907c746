"""Readings at layer boundaries, as one takes them first: before and after every block, forward and backward.

The hooks only read the counter, through `card.mark`: the same on a real GPU and on a simulated one. They keep no
tensor, so the step they watch is the step without them; a test compares the events one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gpt2.memory.trace import Mark, Trace
from gpt2.model import GPT2

PER_STEP = 55  # 12 blocks x before and after x forward and backward, and 7 moments: start, final norm, five lines


@contextmanager
def readings(model: GPT2, card, step: int) -> Iterator[None]:
    """While this lasts, `card.mark` is called around every block of `model`; the hooks are gone afterwards.

    `card` is a Recorder or a SimulatedGpu. In backward a block begins when the gradient of its output is complete, and
    ends when that of its input is.
    """
    handles: list = []

    def hook(tensor: torch.Tensor, *names: str) -> None:
        if tensor.requires_grad:
            handles.append(tensor.register_hook(lambda gradient: mark(*names)))

    def mark(*names: str) -> None:
        for name in names:
            card.mark(name, step)

    def watch(block: nn.Module, number: int) -> None:
        def before(module, inputs):
            mark(f"before block {number}, forward")
            earlier = [f"before block {number - 1}, backward"] if number > 1 else []
            hook(inputs[0], f"after block {number}, backward", *earlier)

        def after(module, inputs, output):
            mark(f"after block {number}, forward")
            if number == len(model.transformer.h):
                hook(output, f"before block {number}, backward")

        handles.extend((block.register_forward_pre_hook(before), block.register_forward_hook(after)))

    try:
        for number, block in enumerate(model.transformer.h, start=1):
            watch(block, number)
        norm = model.transformer.ln_f
        handles.append(norm.register_forward_hook(lambda module, inputs, output: mark("final norm, forward")))
        mark("start")
        yield
    finally:
        for handle in handles:
            handle.remove()


def of_step(trace: Trace, step: int = 2) -> list[Mark]:
    """The readings of a step: those of the hooks and those after each line."""
    return [mark for mark in trace.marks if mark.step == step]
