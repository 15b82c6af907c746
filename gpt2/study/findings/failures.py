"""How steps fail: each failure small, with what it says, what it takes, and what each repair changes.

Runs that fail are rows like the others. Everything here runs on a simulated card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import pandas as pd
import torch

from gpt2.memory import gpus
from gpt2.memory.reading import layout
from gpt2.memory.simulator import SimulatedGpu, collect_garbage
from gpt2.memory.trace import Trace
from gpt2.step import Recipe, Training
from gpt2.study import results, runs
from gpt2.study.experiments import EXPANDABLE, Experiment
from gpt2.study.tables import MIB, Shown


@dataclass(frozen=True)
class Attempt:
    """A run, and how it ended; `message` is PyTorch's, "" if it did not fail."""

    trace: Trace
    message: str

    @property
    def failure(self) -> dict | None:
        """What was asked, where and when."""
        return self.trace.meta["out_of_memory"]

    @property
    def peak_bytes(self) -> int:
        """The highest `memory_allocated()`, up to the failure if there is one."""
        return max(self.trace.allocated_bytes(), default=0)


def attempt(program: Callable[[SimulatedGpu], object], *, gpu: str = "A40", torch_release: str = "2.5.1",
            room_mib: int | None = None, allocator_conf: str = "", about: Mapping | None = None) -> Attempt:
    """Run `program(card)`; running out of memory is an answer. `room_mib` is what is free at the start, if not all."""
    collect_garbage()
    profile = gpus.find(gpu)
    if room_mib:
        profile = gpus.with_memory(profile, room_mib * MIB + profile.context_bytes)
    card = SimulatedGpu(profile, torch=torch_release, allocator_conf=allocator_conf)
    message = ""
    with card:
        try:
            program(card)
        except torch.OutOfMemoryError as error:
            message = str(error)
        trace = card.trace(**(about or {}))
    return Attempt(trace, message)


def predicted_for(*, gpu: str = "A40", torch_release: str = "2.5.1", **_) -> str:
    """What stands below a table whose program an `attempt` ran on this card."""
    return f"Predicted for {gpu}, torch {torch_release}."


@lru_cache
def step(recipe: Recipe, *, gpu: str, torch_release: str, room_mib: int | None = None, steps: int = 2,
         lengths: tuple[int, ...] = (), allocator_conf: str = "") -> Attempt:
    """Training steps of a recipe."""
    experiment = Experiment("failure", recipe, lengths=lengths, steps=len(lengths) or steps)
    return attempt(experiment.run, gpu=gpu, torch_release=torch_release, room_mib=room_mib,
                   allocator_conf=allocator_conf, about=experiment.about())


# --- out of memory in a step ------------------------------------------------------------------------------------------

FIRST_UPDATE = {  # what is tried against a first update that does not fit
    "as it is": {},
    "half the batch": {"batch": 1},
    "fused": {"optimizer": "fused"},
    "moments in bf16": {"moments": "bf16"},
    "update inside backward": {"step_in_backward": True},
}
AT_THE_LOSS = {
    "as it is": {},
    "fused optimizer": {"optimizer": "fused"},
    "del logits": {"keep_logits": False},
    "chunked loss": {"loss": "chunked"},
    "half the batch": {"batch": 4},
}


def repairs(base: Recipe, changes: Mapping[str, Mapping], *, room_mib: int, gpu: str, torch_release: str,
            name: str = "") -> Shown:
    """The run as it is, and with each change: whether it fits, where it fails, what it takes. Saved as `name`."""
    rows = []
    for title, change in changes.items():
        found = step(replace(base, **change), gpu=gpu, torch_release=torch_release, room_mib=room_mib)
        rows.append((title, found.failure is None, *_where(found.failure), found.peak_bytes))
    table = pd.DataFrame(rows, columns=["run", "fits", "fails_in", "asked_bytes", "peak_allocated_bytes"])
    keep(name, table, gpu, torch_release, room_mib=room_mib, recipe=base.describe())
    shown = table.rename(columns={"fails_in": "fails in"})
    shown["asked for (MiB)"], shown["peak allocated (MiB)"] = _mib(table.asked_bytes), _mib(table.peak_allocated_bytes)
    return Shown(shown.drop(columns=["asked_bytes", "peak_allocated_bytes"]),
                 f"{base.describe()}, two steps, {room_mib:,} MiB of room. Predicted: {gpu}, torch {torch_release}.")


def _where(failure: dict | None) -> tuple[str, int | None]:
    if failure is None:
        return "", None
    who = " in ".join(filter(None, (failure["operator"], failure["module"])))
    return f"step {failure['step']}, {failure['phase']}: {who}", failure["requested_bytes"]


def state_first(base: Recipe, *, room_mib: int, gpu: str, torch_release: str) -> Shown:
    """When the missing memory is noticed: in the first update, or before the first batch by a dry update."""
    plain = step(base, gpu=gpu, torch_release=torch_release, room_mib=room_mib)

    def dry(card) -> None:
        training = Training(base, watch=card.watch)
        with card.watch("dry update", 0):
            for parameter in training.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            training.optimizer.step()
            training.optimizer.zero_grad()
        training.step(1)

    early = attempt(dry, gpu=gpu, torch_release=torch_release, room_mib=room_mib)
    rows = [(title, *_where(found.failure), len([e for e in found.trace.events if e.action == "alloc"]))
            for title, found in (("first update after the first batch", plain), ("dry update first", early))]
    return Shown(pd.DataFrame(rows, columns=["order", "fails in", "asked (bytes)", "allocations before it"]),
                 f"Where {room_mib:,} MiB run out. Predicted: {gpu}, torch {torch_release}.")


# --- lengths that vary -----------------------------------------------------------------------------------------------

ROWS = (512, 640, 768, 1024)
WARM_UP = 256  # the length of a first step, the same for all: it makes the optimizer's state


def orders(lengths: tuple[int, ...] = ROWS) -> dict[str, tuple[tuple[int, ...], str]]:
    """The same rows in other orders, padded to two lengths, or with other allocator settings."""
    half = max(lengths) // 2
    return {
        "as they come": ((WARM_UP, *lengths), ""),
        "longest first": ((WARM_UP, *sorted(lengths, reverse=True)), ""),
        "padded to 2 lengths": ((WARM_UP, *(half if n <= half else max(lengths) for n in lengths)), ""),
        "expandable segments": ((WARM_UP, *lengths), EXPANDABLE),
    }


def fragmentation(base: Recipe, *, gpu: str, torch_release: str, lengths: tuple[int, ...] = ROWS) -> pd.DataFrame:
    """A row per order and step: configuration, step, length, peak allocated and reserved of the step, end allocated."""
    frames = []
    for title, (row, conf) in orders(lengths).items():
        found = step(base, gpu=gpu, torch_release=torch_release, lengths=row, allocator_conf=conf)
        frames.append(per_step(found.trace).assign(configuration=title, length=row))
    table = pd.concat(frames, ignore_index=True)
    return table[["configuration", "step", "length", "allocated_bytes", "reserved_bytes", "end_bytes"]]


def per_step(trace: Trace) -> pd.DataFrame:
    """step, allocated_bytes (its peak), reserved_bytes (its peak), end_bytes (allocated at its end) of each step."""
    allocated, reserved = trace.allocated_bytes(), trace.reserved_bytes()
    rows: dict[int, list[int]] = {}
    for event, now, held in zip(trace.events, allocated, reserved, strict=True):
        if event.step:
            row = rows.setdefault(event.step, [0, 0])
            rows[event.step] = [max(row[0], now), max(row[1], held)]
    ends = {mark.step: mark.allocated_bytes for mark in trace.marks}
    return pd.DataFrame([(n, *row, ends.get(n)) for n, row in sorted(rows.items())],
                        columns=["step", "allocated_bytes", "reserved_bytes", "end_bytes"])


def recorded_lengths() -> pd.DataFrame:
    """Ten lengths recorded on the H200, without and with expandable segments; columns as in `fragmentation`."""
    frames = []
    for title, name in (("native", "variable-native"), ("expandable segments", "variable-expandable")):
        trace = runs.recorded(name)
        frames.append(per_step(trace).assign(configuration=title))
    return pd.concat(frames, ignore_index=True)


def worst(table: pd.DataFrame) -> Shown:
    """Of each configuration the largest peaks over its steps, not the mean: the largest is what must fit."""
    rows = table.groupby("configuration", sort=False)[["allocated_bytes", "reserved_bytes"]].max()
    shown = pd.DataFrame({"run": rows.index, "largest peak allocated (MiB)": _mib(rows.allocated_bytes).to_numpy(),
                          "largest reserved (MiB)": _mib(rows.reserved_bytes).to_numpy()})
    shown["reserved above it (share)"] = (rows.reserved_bytes / rows.allocated_bytes - 1).to_numpy()
    return Shown(shown, "The largest over all steps.")


def pinned_segment(room_mib: int = 20_000, *, gpu: str = "A40", torch_release: str = "2.5.1",
                   allocator_conf: str = "") -> Attempt:
    """11 GB come and go; 0.5 GB of small blocks move into their segment and stay; 11 GB are wanted again."""
    def program(card) -> None:
        large = torch.empty(11 * 10**9, dtype=torch.uint8, device="cuda")
        card.mark("11 GB")
        del large
        small = [torch.empty(5 * 10**6, dtype=torch.uint8, device="cuda") for _ in range(100)]
        card.mark("freed, 0.5 GB inside")
        large = torch.empty(11 * 10**9, dtype=torch.uint8, device="cuda")
        card.mark("11 GB again")
        del large, small

    return attempt(program, gpu=gpu, torch_release=torch_release, room_mib=room_mib, allocator_conf=allocator_conf)


def pinned_table(**card) -> Shown:
    """The moments of `pinned_segment`, without and with expandable segments, and at both rooms."""
    rows = []
    for conf in ("", EXPANDABLE):
        found = pinned_segment(allocator_conf=conf, **card)
        failed = next((i for i, e in enumerate(found.trace.events) if e.action == "oom"), None)
        moments = [(m.name, m.event_count - 1) for m in found.trace.marks]
        for name, index in moments + ([("11 GB again: out of memory", failed)] if failed is not None else []):
            at = layout.fragmentation(found.trace, index)
            rows.append((conf or "default", name, at["allocated_bytes"] / MIB, at["reserved_bytes"] / MIB,
                         at["largest_free_bytes"] / MIB))
    heads = ["setting", "moment", "allocated (MiB)", "reserved (MiB)", "largest free piece (MiB)"]
    return Shown(pd.DataFrame(rows, columns=heads), "A card with 20,000 MiB of room; 11 GB are 10,490 MiB. "
                                                    + predicted_for(**card))


def three_sizes(allocator_conf: str, rounds: int = 100, *, gpu: str = "A40", torch_release: str = "2.6.0") -> list[int]:
    """Reserved bytes after each round of: 91 MiB, 45.5 MiB, 2 MiB that stays, and the first two freed."""
    read: list[int] = []

    def program(card) -> None:
        staying = []
        for _ in range(rounds):
            one, two = (torch.empty(size * MIB // 2, dtype=torch.uint8, device="cuda") for size in (182, 91))
            staying.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))
            del one, two
            read.append(torch.cuda.memory_reserved())

    attempt(program, gpu=gpu, torch_release=torch_release, allocator_conf=allocator_conf)
    return read


COMBINED = ("", "max_split_size_mb:128", EXPANDABLE, f"max_split_size_mb:128,{EXPANDABLE}")


def combination(rounds: int = 100) -> Shown:
    """`three_sizes` under each setting alone and both."""
    rows = []
    for conf in COMBINED:
        read = three_sizes(conf, rounds)
        live = 2 * MIB * rounds
        rows.append((conf or "default", read[0] / MIB, read[-1] / MIB, (read[-1] - live) / MIB))
    heads = ["setting", "reserved, round 1 (MiB)", f"reserved, round {rounds} (MiB)", "of which nobody's (MiB)"]
    return Shown(pd.DataFrame(rows, columns=heads), f"91, 45.5 and 2 MiB, {rounds} times; only the 2 MiB stay. "
                 "Predicted: A40, torch 2.6.0.")


# --- tables ---------------------------------------------------------------------------------------------------------


def keep(name: str, table: pd.DataFrame, gpu: str, torch_release: str, **config) -> pd.DataFrame:
    """Write a predicted table as results/predicted/<gpu>/<name>.csv; nothing without a name."""
    if name:
        facts = results.provenance("predicted", gpu=gpu, torch=torch_release, config=config, seed=0)
        results.save_table(table, results.table_path("predicted", name, runs.slug(gpu)), facts)
    return table


def _mib(column: pd.Series) -> pd.Series:
    return column / MIB
