"""The second half of notebook 06: what stays between steps, state that comes early, accumulation, the step by hand."""

from __future__ import annotations

from functools import cache

import pandas as pd
import torch

from gpt2 import by_hand
from gpt2.early_state import allocate_state
from gpt2.memory.ledger import peak_owner
from gpt2.memory.simulator import SimulatedGpu
from gpt2.model import GPT2, size
from gpt2.step import OPTIMIZERS, Recipe, Training
from gpt2.study import recorded
from gpt2.study.experiments import Experiment
from gpt2.study.recorded import HOME
from gpt2.study.runs import predicted
from gpt2.study.tables import MIB, Shown

WHERE = ("end of the step", "before forward", "between forward and backward", "filled with zeros")


def floor(folder: str = HOME) -> Shown:
    """Gradients given back or zeroed: what stays between steps, in bytes per parameter too, and the peak."""
    source = recorded.table("06-zero-grad", folder)
    rows = pd.DataFrame({
        "recipe": source["recipe"], "zero_grad": source["set_to_none"].map({True: "to None", False: "to zeros"}),
        "kernels": source["kernel_count"], "between steps (MiB)": source["floor_bytes"] / MIB,
        "bytes per parameter": source["floor_bytes"] / source["parameter_count"],
        "peak (MiB)": source["peak_bytes"] / MIB, "step (ms)": source["time_ms"]})
    return recorded.shown(rows, "What zero_grad leaves", source)


@cache
def places(batch: int, length: int, gpu: str) -> Shown:
    """Gradients dropped in four places: allocated at the end of forward, and peak, of the second step. Predicted."""
    rows = []
    for where in WHERE:
        after_forward, peak, phase = _dropped(where, batch, length, gpu)
        rows.append((where, after_forward / MIB, peak / MIB, phase))
    columns = ["gradients dropped", "allocated after forward (MiB)", "peak of the step (MiB)", "peak is in"]
    recipe = Recipe(batch=batch, length=length)
    return Shown(pd.DataFrame(rows, columns=columns), f"{recipe.describe()}. Predicted for {gpu}, without a GPU.")


def _dropped(where: str, batch: int, length: int, gpu: str) -> tuple[int, int, str]:
    with SimulatedGpu(gpu) as card:
        training = Training(Recipe(batch=batch, length=length))
        model, optimizer = training.model, training.optimizer
        for step in (1, 2):
            torch.cuda.reset_peak_memory_stats()
            if where in ("before forward", "filled with zeros"):
                optimizer.zero_grad(set_to_none=where == "before forward")
            with card.watch("forward", step):
                _, loss = model(training.tokens[:, :-1], training.tokens[:, 1:])
            after_forward = torch.cuda.memory_allocated()
            if where == "between forward and backward":
                optimizer.zero_grad()
            with card.watch("backward", step):
                loss.backward()
            with card.watch("optimizer", step):
                optimizer.step()
            if where == "end of the step":
                optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated()
        return after_forward, peak, peak_owner(card.trace(), steps=[2]).phase


def small_steps(lengths: tuple[int, ...], gpu: str) -> Shown:
    """Peaks of steps with one sequence, by length: where a saving of activations saves nothing. Predicted."""
    rows = []
    for length in lengths:
        row: list = [length]
        for implementation in ("foreach", "fused"):
            for precision in ("fp32", "bf16"):
                recipe = Recipe(batch=1, length=length, precision=precision, optimizer=implementation)
                owner = peak_owner(predicted(Experiment("", recipe), gpu), steps=(2, 3))
                row.append(f"{owner.allocated_bytes / MIB:,.0f}, {owner.phase}")
        rows.append(row)
    names = [f"{i}, {p} (MiB, where)" for i in ("foreach", "fused") for p in ("fp32", "bf16")]
    what = f"Peaks of a step with a batch of 1. Predicted for {gpu}, without a GPU."
    return Shown(pd.DataFrame(rows, columns=["length", *names]), what)


def early_state(model: str, gpu: str) -> Shown:
    """Memory before and after the state is allocated early, and after the first update. Predicted."""
    rows = []
    for implementation in OPTIMIZERS:
        with SimulatedGpu(gpu):
            training = Training(Recipe(model=model, batch=1, length=16, optimizer=implementation, attention="sdpa"))
            before = torch.cuda.memory_allocated()
            allocate_state(training.optimizer)
            early = torch.cuda.memory_allocated()
            training.step(1)
            rows.append((implementation, before / MIB, early / MIB, torch.cuda.memory_allocated() / MIB))
    columns = ["AdamW", "model made (MiB)", "state allocated (MiB)", "after the first step (MiB)"]
    return Shown(pd.DataFrame(rows, columns=columns), f"GPT-2 {model}. Predicted for {gpu}, without a GPU.")


def early_state_differs() -> Shown:
    """How far weights are, after three updates, from those of an optimizer left alone: real numbers, on the CPU."""
    alone = _trained(lambda optimizer, parameters: None)
    ways = {"allocate_state before the first update": lambda optimizer, parameters: allocate_state(optimizer),
            "a step with gradients of zero before it": _dry_step}
    off = [max((a - b).abs().max().item() for a, b in zip(_trained(prepare), alone, strict=True))
           for prepare in ways.values()]
    table = pd.DataFrame({"way": list(ways), "largest difference of a weight": [f"{d:.1e}" if d else "0" for d in off]})
    return Shown(table, "Three updates of AdamW at a learning rate of 0.001, float64, computed now.")


def _dry_step(optimizer, parameters) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def _trained(prepare) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(64, 64, generator=generator, dtype=torch.float64)) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    prepare(optimizer, parameters)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(64, 64, generator=generator, dtype=torch.float64)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def accumulation(folder: str = HOME) -> Shown:
    """k micro-batches to an update: time, tokens a second, peak."""
    source = recorded.table("06-accumulation", folder)
    rows = pd.DataFrame({
        "plan": source["recipe"], "k": source["accumulate"], "micro-batch": source["batch"],
        "update every (ms)": source["time_ms"], "tokens a second": source["tokens_per_second"],
        "peak (MiB)": source["peak_bytes"] / MIB})
    return recorded.shown(rows, "Accumulation, GPT-2 124M, bf16, fused attention, 1,024 tokens", source)


@cache
def window(k: int, batch: int, length: int, gpu: str) -> Shown:
    """What is allocated after each micro-batch of a window of k, in bytes per parameter. Predicted."""
    with SimulatedGpu(gpu) as card:
        training = Training(Recipe(batch=batch, length=length, accumulate=k), watch=card.watch)
        training.step(1)
        training.step(2)
        count = sum(p.numel() for p in training.model.parameters())
        held = sum(b.nbytes for b in training.model.buffers())
    marks = [m for m in card.marks if m.step == 2 and m.name in ("del logits", "optimizer", "zero_grad")]
    names = [f"after micro-batch {i}" for i in range(1, k + 1)] + ["after the update", "after zero_grad"]
    rows = [(name, m.allocated_bytes / MIB, (m.allocated_bytes - held) / count)
            for name, m in zip(names, marks, strict=True)]
    table = pd.DataFrame(rows, columns=["moment", "allocated (MiB)", "bytes per parameter, masks apart"])
    return Shown(table, f"Step 2, {k} micro-batches of {batch} x {length:,}. Predicted for {gpu}, without a GPU.")


def zeroed_inside() -> Shown:
    """The gradient of a window whose zero_grad stands in the wrong place: real numbers, on the CPU."""
    places = {"zero_grad once, after the update": False, "zero_grad before each backward": True}
    errors = [_gradient_error(inside=inside) for inside in places.values()]
    said = ["under 1e-12" if error < 1e-12 else f"{error:.0%} of it" for error in errors]
    table = pd.DataFrame({"place": list(places), "error of the gradient": said})
    return Shown(table, "Four micro-batches of a tiny model, relative to one batch of all. Computed now.")


def _gradient_error(*, inside: bool, k: int = 4) -> float:
    torch.manual_seed(0)
    model = GPT2(size("tiny")).double()
    tokens = torch.randint(0, model.size.vocabulary, (2 * k, 17))
    model(tokens[:, :-1], tokens[:, 1:])[1].backward()
    right = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for part in tokens.chunk(k):
        if inside:
            model.zero_grad()
        (model(part[:, :-1], part[:, 1:])[1] / k).backward()
    wrong = sum((p.grad - g).square().sum() for p, g in zip(model.parameters(), right, strict=True))
    return float((wrong / sum(g.square().sum() for g in right)).sqrt())


def by_hand_against_autograd(steps: int = 3) -> Shown:
    """Weights after each step of `gpt2.by_hand` and of autograd with torch.optim.AdamW: real numbers, on the CPU."""
    torch.manual_seed(0)
    model = GPT2(size("tiny")).double()
    ours, tokens = by_hand.GPT2(model), torch.randint(0, model.size.vocabulary, (3, 17))
    optimizer, rows = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for t in range(1, steps + 1):
        loss = by_hand.step(ours, tokens[:, :-1], tokens[:, 1:], t, clip=1.0, lr=1e-3)
        _, expected = model(tokens[:, :-1], tokens[:, 1:])
        expected.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        pairs = [(ours.parameters[name].value, value) for name, value in model.named_parameters()]
        off = max((a - b).abs().max().item() for a, b in pairs)
        rows.append((t, f"{loss.item():.6f}", f"{expected.item():.6f}", "under 1e-10" if off < 1e-10 else f"{off:.1e}"))
    columns = ["step", "loss by hand", "loss of autograd", "largest difference of a weight"]
    return Shown(pd.DataFrame(rows, columns=columns), "A tiny GPT-2 in float64, clipped to a norm of 1. Computed now.")


@cache
def resumed(gpu: str) -> Shown:
    """A checkpoint on the card while training goes on: bytes per parameter. Predicted."""
    with SimulatedGpu(gpu):
        training = Training(Recipe(batch=1, length=16, attention="sdpa"))
        training.step(1)
        count = sum(p.numel() for p in training.model.parameters())
        saved = {"model": _clones(training.model.state_dict()), "optimizer": _clones(training.optimizer.state_dict())}
        del training
        loaded = torch.cuda.memory_allocated()
        training = Training(Recipe(batch=1, length=16, attention="sdpa"))
        made = torch.cuda.memory_allocated()
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        taken = torch.cuda.memory_allocated()
        del saved
        dropped = torch.cuda.memory_allocated()
    moments = {"checkpoint loaded": loaded, "model made": made, "both load_state_dict": taken,
               "checkpoint dropped": dropped}
    table = pd.DataFrame({"moment": list(moments), "bytes per parameter": [n / count for n in moments.values()]})
    return Shown(table, f"Resuming with the checkpoint on the card. Predicted for {gpu}, without a GPU.")


def _clones(tree, seen: dict | None = None):
    """A copy of a state dict with tensors of its own; what is one tensor stays one, as torch.load has it."""
    seen = {} if seen is None else seen
    if isinstance(tree, torch.Tensor):
        return seen.setdefault(tree.data_ptr() or id(tree), tree.clone())
    return {key: _clones(value, seen) for key, value in tree.items()} if isinstance(tree, dict) else tree
