"""The tables of notebook 06: what the update costs in kernels, bytes moved, time and memory for a moment."""

from __future__ import annotations

from functools import cache

import pandas as pd
import torch

from gpt2.memory.simulator import SimulatedGpu
from gpt2.step import OPTIMIZERS
from gpt2.study import launches, recorded
from gpt2.study.recorded import HOME
from gpt2.study.tables import MIB, Shown
from gpt2.study.timing.optimizer import parameters_of, peak, shapes_of
from gpt2.study.timing.stream import bandwidth

MODELS, ORDER = ("124M", "1.3B"), ("loop", "foreach", "fused")


def sizes(model: str) -> list[int]:
    """Elements of each parameter of a model."""
    return [shape.numel() for shape in shapes_of(model)]


def parameter_count(model: str) -> int:
    """Elements of all of them."""
    return sum(sizes(model))


@cache
def memory(gpu: str = "H200") -> dict[tuple[str, str], dict[str, int]]:
    """Bytes of an update by (model, implementation), on a simulated card, in the order of the recording: weights,
    what the first update adds to what is held before it, what a later one adds."""
    found = {}
    with SimulatedGpu(gpu):
        bandwidth()  # as in the recording: its three segments of 4 GiB are there when the first parameters are made
        for model in MODELS:
            for implementation in OPTIMIZERS:
                parameters = parameters_of(model)
                options = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
                optimizer = torch.optim.AdamW(parameters, **options)
                before = torch.cuda.memory_allocated()
                first = peak(optimizer.step) - before
                later = peak(optimizer.step) - torch.cuda.memory_allocated()
                found[model, implementation] = {"weights": 4 * parameter_count(model), "first": first, "later": later}
                del parameters, optimizer
                torch.cuda.empty_cache()
    return found


def kernels(folder: str = HOME) -> Shown:
    """Kernels of one update: by the rule that cuts lists of tensors, and as recorded."""
    source, rows = recorded.table("06-adamw", folder), []
    for model in MODELS:
        for implementation in ORDER:
            real = recorded.one("06-adamw", "kernel_count", folder, model=model, implementation=implementation)
            by_rule = launches.adamw_kernels(sizes(model), implementation)
            rows.append((model, implementation, len(sizes(model)), by_rule, int(real)))
    columns = ["model", "AdamW", "tensors", "kernels (by rule)", "kernels (recorded)"]
    return recorded.shown(pd.DataFrame(rows, columns=columns), "Kernels of one update", source)


def temporaries(folder: str = HOME) -> Shown:
    """Memory that an update needs for a moment, at the first one and later: predicted and recorded, in weights."""
    source, rows = recorded.table("06-adamw", folder), []
    for model in MODELS:
        for implementation in ORDER:
            here = memory()[model, implementation]
            real = recorded.of("06-adamw", folder, model=model, implementation=implementation).iloc[0]
            off = here["first"] - real["first_step_extra_bytes"], here["later"] - real["temporary_bytes"]
            rows.append((model, implementation, here["first"] / MIB, real["first_step_extra_bytes"] / MIB,
                         here["later"] / MIB, real["temporary_bytes"] / MIB, sum(map(abs, off)),
                         here["later"] / here["weights"]))
    columns = ["model", "AdamW", "first update, predicted (MiB)", "first update, recorded (MiB)",
               "later, predicted (MiB)", "later, recorded (MiB)", "differences (bytes)",
               "later, in copies of the weights"]
    what = "What an update adds to what is held before it; predicted for the H200, without a GPU"
    return recorded.shown(pd.DataFrame(rows, columns=columns), what, source)


def updates(model: str, folder: str = HOME) -> pd.DataFrame:
    """The recorded updates of a model, as `figures.optimizers` wants them."""
    rows = recorded.of("06-adamw", folder, model=model).set_index("implementation")
    return rows.loc[list(ORDER)].reset_index()


def copy_rate(folder: str = HOME) -> float:
    """Bytes a second that the card copies, reads and writes counted, in the run that timed the updates."""
    source = recorded.of("06-bandwidth", folder, what="copy")
    return float((source["moved_bytes"] / source["time_ms"]).median() * 1000)


def traffic(folder: str = HOME) -> Shown:
    """Bytes that each implementation moves, over the time it takes, against what the card copies."""
    source, rows = recorded.table("06-adamw", folder), []
    for model in MODELS:
        for implementation in ORDER:
            real = recorded.of("06-adamw", folder, model=model, implementation=implementation).iloc[0]
            moved = launches.adamw_bytes_per_parameter(implementation) * parameter_count(model)
            rate = moved / real["busy_ms"] * 1000
            rows.append((model, implementation, moved // parameter_count(model), moved / 1e9, real["update_ms"],
                         real["host_ms"], real["busy_ms"], rate / 1e12, rate / copy_rate(folder)))
    columns = ["model", "AdamW", "bytes per parameter (by rule)", "moved (GB of 10^9)", "takes (ms)",
               "Python takes (ms)", "kernels alone (ms)", "kernels move (TB/s)", "of the copy's rate (share)"]
    what = f"The card copies at {copy_rate(folder) / 1e12:.2f} TB/s, reads and writes counted, in the same run"
    return recorded.shown(pd.DataFrame(rows, columns=columns), what, source)


def share_of_limit(model: str, implementation: str, folder: str = HOME) -> float:
    """The rate at which an update's kernels move bytes, over the card's copy rate."""
    taken = recorded.one("06-adamw", "busy_ms", folder, model=model, implementation=implementation)
    moved = launches.adamw_bytes_per_parameter(implementation) * parameter_count(model)
    return moved / taken * 1000 / copy_rate(folder)


def clipping(folder: str = HOME) -> Shown:
    """Clipping: kernels, time, memory, syncs."""
    source = recorded.table("06-clip", folder)
    rows = pd.DataFrame({
        "model": source["model"], "clip_grad_norm_": source["way"], "kernels": source["kernel_count"],
        "takes (ms)": source["time_ms"], "for a moment (KiB)": source["temporary_bytes"] / 1024,
        "syncs": source["sync_count"]})
    return recorded.shown(rows, "Clipping all gradients to a norm of 1", source)


def rates(folder: str = HOME) -> pd.DataFrame:
    """What `figures.rates` wants: model, implementation, rate in TB/s, bytes_each."""
    rows = []
    for model in MODELS:
        for implementation in ORDER:
            rate = share_of_limit(model, implementation, folder) * copy_rate(folder) / 1e12
            rows.append((model, implementation, rate, launches.adamw_bytes_per_parameter(implementation)))
    return pd.DataFrame(rows, columns=["model", "implementation", "rate", "bytes_each"])


def passes() -> Shown:
    """What each kernel of an update does to every element, unfused and fused. By rule."""
    rows = [(form, step.operator, step.reads, step.writes, launches.FP32 * (step.reads + step.writes))
            for form, steps in (("loop and foreach", launches.UNFUSED), ("fused", launches.FUSED)) for step in steps]
    for form in ("foreach", "fused"):
        rows.append((f"{form}, all", "", None, None, launches.adamw_bytes_per_parameter(form)))
    columns = ["AdamW", "kernel", "reads", "writes", "bytes per parameter"]
    return Shown(pd.DataFrame(rows, columns=columns), "Reads and writes of fp32 numbers, if no cache helps. By rule.")
