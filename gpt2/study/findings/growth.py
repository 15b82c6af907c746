"""Memory that grows from step to step: what a habit keeps, and what each repair gives back. Small, on a simulated card.

Each of the `HABITS` is one step of somebody's loop: `habit(net, x, kept)` does the step and keeps what it keeps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pandas as pd
import torch
from torch import nn

from gpt2.memory.simulator import SimulatedGpu
from gpt2.study.findings.failures import MIB, Attempt, attempt, predicted_for
from gpt2.study.tables import Shown

ROWS, WIDTH = 4096, 256  # of the small net's input: 4 MiB in fp32
OUT_BYTES = ROWS * WIDTH * 4
STEPS = 5


def small_net() -> nn.Sequential:
    """Two linear layers; its hidden tensors have 16 MiB each, its output 4 MiB."""
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).cuda()


def _loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def summed_after_backward(net, x, kept: list) -> None:
    """`total = total + loss` after `loss.backward()`."""
    loss = _loss(net, x)
    loss.backward()
    kept[:] = [kept[0] + loss if kept else loss]


def summed_without_backward(net, x, kept: list) -> None:
    """The same in validation, where nobody calls backward."""
    loss = _loss(net, x)
    kept[:] = [kept[0] + loss if kept else loss]


def listed_without_backward(net, x, kept: list) -> None:
    """`losses.append(loss)` in validation."""
    kept.append(_loss(net, x))


def listed_after_backward(net, x, kept: list) -> None:
    """`losses.append(loss)` in training."""
    loss = _loss(net, x)
    loss.backward()
    kept.append(loss)


def numbers_listed(net, x, kept: list) -> None:
    """`losses.append(loss.item())`."""
    loss = _loss(net, x)
    loss.backward()
    kept.append(loss.item())


def no_grad(net, x, kept: list) -> None:
    """Validation as it should be."""
    with torch.no_grad():
        kept[:] = [kept[0] + _loss(net, x) if kept else _loss(net, x)]


def outputs_listed(net, x, kept: list) -> None:
    """`outputs.append(out.detach())`, for a picture at the end."""
    with torch.no_grad():
        kept.append(net(x))


HABITS: dict[str, Callable] = {
    "total + loss, after backward": summed_after_backward,
    "total + loss, no backward": summed_without_backward,
    "append(loss), no backward": listed_without_backward,
    "append(loss), after backward": listed_after_backward,
    "append(loss.item())": numbers_listed,
    "total + loss, no_grad": no_grad,
    "append(outputs), no_grad": outputs_listed,
}


def growth(steps: int = STEPS, *, gpu: str = "A40", torch_release: str = "2.5.1") -> pd.DataFrame:
    """`memory_allocated()` after each step of each habit: habit, step, allocated_bytes, growth_bytes."""
    rows = []
    for title, habit in HABITS.items():
        read = after_each_step(habit, steps, gpu=gpu, torch_release=torch_release)
        rows += [(title, n, now, now - before)
                 for n, (before, now) in enumerate(zip([read[0], *read], read, strict=False), start=1)]
    return pd.DataFrame(rows, columns=["habit", "step", "allocated_bytes", "growth_bytes"])


def after_each_step(habit: Callable, steps: int = STEPS, **card) -> list[int]:
    """Allocated bytes after each step; a step before the first takes what is taken once (workspaces, gradients)."""
    read: list[int] = []

    def program(gpu: SimulatedGpu) -> None:
        net, x, kept = small_net(), torch.randn(ROWS, WIDTH, device="cuda"), []
        _loss(net, x).backward()
        for step in range(1, steps + 1):
            with gpu.watch("step", step):
                habit(net, x, kept)
            read.append(torch.cuda.memory_allocated())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a value that a simulation does not have is read: that is the point
        attempt(program, **card)
    return read


def growth_table(table: pd.DataFrame, *, gpu: str, torch_release: str) -> Shown:
    """What each habit adds per step, once it has settled."""
    last = table[table.step == table.step.max()]
    rows = pd.DataFrame({"habit": last.habit, "grows per step (bytes)": last.growth_bytes,
                         "per step (MiB)": last.growth_bytes / MIB})
    return Shown(rows, f"A two-layer net, {ROWS:,} rows of {WIDTH}; the last of {table.step.max()} steps. "
                       f"Predicted: {gpu}, torch {torch_release}.")


# --- outputs held over ------------------------------------------------------------------------------------------------


def held_over(delete: bool, steps: int = 3, **card) -> list[int]:
    """Peak bytes of each step of `out = net(x)`; with `delete` the loop ends with `del out`."""
    peaks: list[int] = []

    def program(gpu: SimulatedGpu) -> None:
        net, x = small_net(), torch.randn(ROWS, WIDTH, device="cuda")
        with torch.no_grad():
            net(x)
            for _ in range(steps):
                torch.cuda.reset_peak_memory_stats()
                out = net(x)
                peaks.append(torch.cuda.max_memory_allocated())
                if delete:
                    del out

    attempt(program, **card)
    return peaks


def held_over_table(**card) -> Shown:
    """The second step's peak over the first's, with and without `del out`."""
    rows = []
    for title, delete in (("out = net(x)", False), ("out = net(x); ...; del out", True)):
        first, second, *_ = held_over(delete, **card)
        rows.append((title, first / MIB, second / MIB, second - first))
    heads = ["loop", "peak of step 1 (MiB)", "peak of step 2 (MiB)", "difference (bytes)"]
    return Shown(pd.DataFrame(rows, columns=heads), f"The output has {OUT_BYTES:,} bytes. {predicted_for(**card)}")


# --- hooks that keep tensors ------------------------------------------------------------------------------------------


@contextmanager
def hooked(net: nn.Module, hook: Callable) -> Iterator[None]:
    """A forward hook on every module, taken away in any case."""
    handles = [module.register_forward_hook(hook) for module in net]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def kept_by_hooks(what: str, **card) -> int:
    """Bytes that are still allocated after a hooked forward: hooks that store `outputs`, or only their `numbers`."""
    read: list[int] = []

    def program(gpu: SimulatedGpu) -> None:
        net, x, stored = small_net(), torch.randn(ROWS, WIDTH, device="cuda"), []
        with torch.no_grad():
            net(x)
            read.append(torch.cuda.memory_allocated())
            with hooked(net, lambda m, args, out: stored.append(out if what == "outputs" else out.numel())):
                net(x)
        read.append(torch.cuda.memory_allocated())

    attempt(program, **card)
    return read[1] - read[0]


def hooks_table(**card) -> Shown:
    """What hooks keep."""
    rows = [(f"a hook that stores {what}", kept_by_hooks(what, **card)) for what in ("outputs", "numbers")]
    return Shown(pd.DataFrame(rows, columns=["hook", "kept after the forward (bytes)"]),
                 f"Three modules, one forward without gradients. {predicted_for(**card)}")


# --- a caught error -----------------------------------------------------------------------------------------------


def caught(**card) -> tuple[Attempt, list[tuple[str, int]]]:
    """A function that takes 500 MiB and then more than there is; its error is caught and kept for a log."""
    read: list[tuple[str, int]] = []

    def hungry() -> None:
        tensors = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda") for _ in range(5)]
        tensors.append(torch.empty(1000 * MIB, dtype=torch.uint8, device="cuda"))

    def program(gpu: SimulatedGpu) -> None:
        errors = []
        try:
            hungry()
        except torch.OutOfMemoryError as error:
            errors.append(error)
        read.append(("caught, and the error kept in a list", torch.cuda.memory_allocated()))
        torch.cuda.empty_cache()
        read.append(("after empty_cache()", torch.cuda.memory_allocated()))
        errors[0] = str(errors[0])
        read.append(("the error's text kept instead", torch.cuda.memory_allocated()))

    return attempt(program, room_mib=1000, **card), read


def caught_table(**card) -> Shown:
    """Where the 500 MiB are."""
    _, read = caught(**card)
    return Shown(pd.DataFrame([(what, size / MIB) for what, size in read], columns=["moment", "allocated (MiB)"]),
                 f"A card with 1,000 MiB of room. {predicted_for(**card)}")
