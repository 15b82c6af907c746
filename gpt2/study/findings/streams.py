"""The tables of notebook 05: the step as a stream of kernels, who waits for whom, and where the time goes."""

from __future__ import annotations

import warnings
from functools import cache

import pandas as pd

from gpt2.memory.simulator import SimulatedGpu
from gpt2.step import Recipe
from gpt2.study import flops, recorded, syncs, timeline
from gpt2.study.recorded import HOME
from gpt2.study.tables import Shown
from gpt2.study.timing.stream import BF16, STREAMED, TIMED, small
from gpt2.study.timing.sync_costs import HABITS, ready

PHASES = ("batch", "forward", "backward", "clip", "optimizer", "zero_grad")
NO_VALUES = ("condition",)  # a simulated card cannot go on after it


@cache
def operators(recipe: Recipe) -> pd.DataFrame:
    """`flops.operators`, once per recipe."""
    return flops.operators(recipe)


def kernels_by_phase(folder: str = HOME) -> Shown:
    """Operators counted now, without a GPU, beside kernels that were recorded, for two recipes."""
    source, rows = recorded.table("05-kernels", folder), pd.DataFrame({"phase": list(PHASES)})
    for name in ("fp32", "bf16-sdpa"):
        calls = operators(STREAMED[name]).groupby("phase")["call_count"].sum()
        kernels = source[source["recipe"] == name].groupby("phase")["kernel_count"].sum()
        rows[f"{name}: operators (counted)"] = [int(calls.get(phase, 0)) for phase in PHASES]
        rows[f"{name}: kernels (recorded)"] = [int(kernels.get(phase, 0)) for phase in PHASES]
    rows.loc[len(rows)] = ["whole step", *(int(rows[column].sum()) for column in rows.columns[1:])]
    return recorded.shown(rows, "Operators of a step that do work, counted on a simulated card, and kernels", source)


def kernel_count(recipe: str, phase: str, folder: str = HOME) -> int:
    """Kernels of one phase as recorded."""
    return int(recorded.of("05-kernels", folder, recipe=recipe, phase=phase)["kernel_count"].sum())


def pieces(name: str, folder: str = HOME) -> pd.DataFrame:
    """A recorded timeline as `figures.kernel_timeline` wants it, in ms; waits at its end left out."""
    table = recorded.table(f"05-timeline-{name}", folder)
    table = table[(table["lane"] == "device") | (table["kind"] == "launch")]
    table = table[table["phase"].isin(PHASES)]
    return _in_ms(table)


def lanes(name: str, folder: str = HOME) -> pd.DataFrame:
    """A recorded timeline over several steps, as `figures.late_loader` wants it."""
    table = recorded.table(f"05-timeline-{name}", folder)
    return _in_ms(table[table["lane"].isin(("python", "device"))])


def _in_ms(table: pd.DataFrame) -> pd.DataFrame:
    started = table["start_ns"] - table["start_ns"].min()
    out = table.assign(start_ms=started / 1e6, duration_ms=table["duration_ns"] / 1e6)
    out.attrs = table.attrs
    return out


def lines(recipe: str, folder: str = HOME) -> Shown:
    """When a line returns, when the device has done it, and what it takes if one waits."""
    source = recorded.of("05-host-lines", folder, recipe=recipe)
    free, waited = (source[source["synchronised"] == flag].set_index("phase") for flag in (False, True))
    rows = pd.DataFrame({
        "line": free.index,
        "returns after (ms)": free["host_ms"].diff().fillna(free["host_ms"]).to_numpy(),
        "takes if waited for (ms)": waited["host_ms"].diff().fillna(waited["host_ms"]).to_numpy(),
        "has returned at (ms)": free["host_ms"].to_numpy(),
        "device is done at (ms)": free["device_ms"].to_numpy(),
    })
    rows["device behind by (ms)"] = rows["device is done at (ms)"] - rows["has returned at (ms)"]
    return recorded.shown(rows, f"Lines of a step, {TIMED[recipe].describe()}: medians", source)


@cache
def habits_counted() -> pd.DataFrame:
    """Syncs of one step with each habit, counted now on a simulated card: habit, sync_count."""
    rows = []
    with warnings.catch_warnings(), SimulatedGpu("H200"):
        warnings.simplefilter("ignore")  # that a simulated card has no values is known here
        loop = ready(small(BF16, True))
        for name, (_, habit) in HABITS.items():
            if name not in NO_VALUES:
                rows.append((name, syncs.count(lambda habit=habit: habit(loop)).count))
    return pd.DataFrame(rows, columns=["habit", "sync_count"])


def sync_counts(folder: str = HOME) -> Shown:
    """Syncs in a step: counted now on a simulated card of two layers, and by PyTorch on a real one of twelve."""
    real = recorded.table("05-sync-counts", folder)
    rows = real[["habit", "says", "sync_count"]].merge(habits_counted(), on="habit", how="left", suffixes=("", "_sim"))
    simulated = ["needs values" if pd.isna(count) else int(count) for count in rows["sync_count_sim"]]
    out = pd.DataFrame({"habit": rows["says"], "2 layers, simulated": simulated})
    out["12 layers, recorded"] = rows["sync_count"]
    return recorded.shown(out, "Times that one step makes the host wait", real)


def sync_costs(folder: str = HOME) -> Shown:
    """What each habit adds to a step, in ms and as a share of the plain step, for three recipes."""
    source = recorded.table("05-sync-costs", folder)
    rows = pd.DataFrame({"habit": [says for says, _ in HABITS.values()]}, index=list(HABITS))
    for name, part in source.groupby("recipe", sort=False):
        times = part.set_index("habit")["time_ms"]
        rows[f"{name} (ms a step)"] = times
        rows[f"{name} (share)"] = times / times["plain"] - 1
    return recorded.shown(rows.reset_index(drop=True), "A step with each habit; the share is what it adds", source)


def idle_ratio(recipe: str, habit: str, folder: str = HOME) -> float:
    """Share of a step in which the device has nothing to do: what the step takes longer than its kernels do."""
    taken = recorded.one("05-sync-costs", "time_ms", folder, recipe=recipe, habit=habit)
    return 1 - busy_ms(recipe, folder) / taken


def busy_ms(recipe: str, folder: str = HOME) -> float:
    """The kernels of a step, added up."""
    return recorded.of("05-kernels", folder, recipe=recipe)["busy_ns"].sum() / 1e6


def copies(folder: str = HOME) -> Shown:
    """Copies to the device: bandwidth, and how long Python is held, the device idle or busy before."""
    source = recorded.table("05-copies", folder)
    rows = pd.DataFrame({
        "what": source["what"], "size (MiB)": source["size_bytes"] / 2**20, "memory": source["memory"],
        "call": source["call"], "copy (ms)": source["copy_ms"], "GB/s": source["size_bytes"] / source["copy_ms"] / 1e6,
        "Python held (ms)": source["host_ms"], "Python held, device busy (ms)": source["busy_host_ms"]})
    busy = source["busy_ms"].median()
    what = f"Copies from host to device; a busy device has {busy:.1f} ms of work before them"
    return recorded.shown(rows, what, source)


def overlap(folder: str = HOME) -> Shown:
    """What a copy beside a computation takes."""
    source = recorded.table("05-overlap", folder)
    rows = pd.DataFrame({"way": source["way"], "takes (ms)": source["time_ms"]})
    return recorded.shown(rows, "Images for the next step, and the computation of this one", source)


def loader(folder: str = HOME) -> Shown:
    """Step times with a loader that needs its time, three ways."""
    source = recorded.table("05-loader", folder)
    rows = source.pivot(index="delay_ms", columns="way", values="time_ms")
    rows = rows[list(dict.fromkeys(source["way"]))].add_suffix(" (ms a step)").reset_index()
    rows = rows.rename(columns={"delay_ms": "loader needs (ms)"})
    return recorded.shown(rows, f"{BF16.describe()}, with a loader that is late", source)


def flops_by_formula(recipe: Recipe) -> Shown:
    """FLOPs of the step by formula and by PyTorch's counter, both now."""
    counted = flops.counted(recipe)
    groups = [("addmm",), ("bmm", "attention"), ("mm",)]
    forward = flops.forward(recipe.size, recipe.batch, recipe.length)
    rows = []
    for (_, row), names in zip(forward.iterrows(), groups, strict=True):
        of_forward = counted[(counted["phase"] == "forward") & counted["operator"].map(lambda o, n=names: _is(o, n))]
        rows.append((row["operator"], row["formula"], row["flop_count"] / 1e9, of_forward["flop_count"].sum() / 1e9))
    for phase in ("forward", "backward"):
        total = counted.loc[counted["phase"] == phase, "flop_count"].sum()
        formula = int(forward["flop_count"].sum()) if phase == "forward" else flops.backward(
            recipe.size, recipe.batch, recipe.length, fused_attention=recipe.attention == "sdpa")
        rows.append((f"{phase}, all", "", formula / 1e9, total / 1e9))
    table = pd.DataFrame(rows, columns=["products of matrices", "formula", "by formula (GFLOP)", "counted (GFLOP)"])
    return Shown(table, f"{recipe.describe()}: FLOPs, computed now without a GPU.")


def _is(operator: str, names: tuple[str, ...]) -> bool:
    short = operator.removeprefix("aten.")
    return any(short == name or name == "attention" and "attention" in short for name in names)


def utilisation(folder: str = HOME) -> Shown:
    """Forward and backward timed; the FLOPs that the model needs, over the step's time and the card's ceiling."""
    source = recorded.table("05-phases", folder)
    rows = []
    for name in dict.fromkeys(source["recipe"]):
        recipe = TIMED[name]
        times = source[source["recipe"] == name].set_index("phase")["time_ms"]
        step = times.drop("step").sum()
        rate = flops.model_flops(recipe.size, recipe.batch, recipe.length) / step / 1e9
        speed, share = 1000 * recipe.tokens / step, rate / ceiling(recipe.precision, folder)
        rows.append((name, recipe.batch, times["forward"], times["backward"], times["backward"] / times["forward"],
                     step, speed, rate, share))
    table = pd.DataFrame(rows, columns=["recipe", "batch", "forward (ms)", "backward (ms)", "backward : forward",
                                        "step (ms)", "tokens a second", "TFLOP/s", "of the card's ceiling (share)"])
    table["tokens a second"] = table["tokens a second"].round().astype(int)
    tops = ", ".join(f"{p} {ceiling(p, folder):,.0f}" for p in ("bf16", "fp32"))
    return recorded.shown(table, f"Ceilings are the largest products of the same run, TFLOP/s: {tops}", source)


def ceiling(precision: str, folder: str = HOME) -> float:
    """TFLOP/s of a large square product in this precision, tf32 off, as recorded."""
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    row = recorded.of("05-ceilings", folder, what="large square", dtype=dtype, tf32=False).iloc[0]
    return row["flop_count"] / row["time_ms"] / 1e9


def products(folder: str = HOME) -> Shown:
    """The step's own products, timed inside the step: FLOPs by formula over the time of their kernels."""
    source, rows = recorded.table("05-kernels", folder), []
    for name in ("fp32", "bf16-sdpa"):
        recipe = STREAMED[name]
        linear, attention, head = flops.forward(recipe.size, recipe.batch, recipe.length)["flop_count"]
        others = flops.backward(recipe.size, recipe.batch, recipe.length, fused_attention=name != "fp32")
        for what, phase, operators_, count in (
                ("linear layers of the blocks", "forward", ("aten.addmm",), linear),
                ("attention", "forward", ("aten.bmm", "aten._cudnn_attention_forward"), attention),
                ("lm_head", "forward", ("aten.mm",), head),
                ("all products", "backward", ("aten.mm", "aten.bmm", "aten._cudnn_attention_backward"), others)):
            here = (source["recipe"] == name) & (source["phase"] == phase)
            chosen = source[here & source["operator"].isin(operators_)]
            took = chosen["busy_ns"].sum() / 1e6
            rate = count / took / 1e9
            rows.append((name, f"{phase}: {what}", count / 1e9, took, rate, rate / ceiling(recipe.precision, folder)))
    columns = ["recipe", "products", "GFLOP", "kernels take (ms)", "TFLOP/s", "of the ceiling (share)"]
    return recorded.shown(pd.DataFrame(rows, columns=columns), "Products of matrices inside the step", source)


def by_kind(recipe: str, folder: str = HOME) -> pd.DataFrame:
    """Kernels of a step by kind and phase: kind, phase, kernel_count, busy_ms; the longest kind first."""
    source = recorded.of("05-kernels", folder, recipe=recipe)
    kinds = source["kind"].where(source["kind"] != "other", source["name"].map(timeline.kind_of))  # named since
    groups = source.assign(kind=kinds).groupby(["kind", "phase"], sort=False)
    rows = groups[["kernel_count", "busy_ns"]].sum().reset_index()
    rows["busy_ms"] = rows.pop("busy_ns") / 1e6
    order = rows.groupby("kind")["busy_ms"].sum().sort_values(ascending=False)
    rows["rank"] = rows["kind"].map({kind: i for i, kind in enumerate(order.index)})
    rows = rows.sort_values("rank", kind="stable").drop(columns="rank").reset_index(drop=True)
    rows.attrs = source.attrs
    return rows


def graphs(folder: str = HOME) -> Shown:
    """A step launched kernel by kernel and as one CUDA graph."""
    source = recorded.table("05-graphs", folder)
    rows = pd.DataFrame({
        "batch": source["batch"], "step": source["mode"], "takes (ms)": source["time_ms"],
        "Python held (ms)": source["host_ms"], "loss before": source["first_loss"], "loss after": source["last_loss"]})
    return recorded.shown(rows, f"{BF16.describe()}: launched one by one, and replayed as a graph", source)


def outside(folder: str = HOME) -> Shown:
    """What the process takes on the card, and what the allocator knows of it."""
    row = recorded.table("05-outside", folder).iloc[0]
    sizes = {"in use on the card": row["used_bytes"], "reserved by the allocator": row["reserved_bytes"],
             "allocated": row["allocated_bytes"], "outside the allocator": row["used_bytes"] - row["reserved_bytes"]}
    rows = pd.DataFrame({"what": list(sizes), "MiB": [size / 2**20 for size in sizes.values()]})
    return recorded.shown(rows, "A process that trains, seen from outside", recorded.table("05-outside", folder))


def of_a_trace(path: str, otherwise: str, folder: str = HOME) -> Shown:
    """Kernels and their time by phase and kind: of somebody's own Chrome trace, or of the recording of a recipe."""
    if path:
        rows, said = timeline.by_kind(timeline.read(path)).assign(busy_ms=lambda t: t.pop("busy_ns") / 1e6), None
    else:
        rows, said = by_kind(otherwise, folder), recorded.table("05-kernels", folder)
        rows = rows.sort_values("busy_ms", ascending=False).head(12)[["phase", "kind", "kernel_count", "busy_ms"]]
    rows = rows.rename(columns={"kernel_count": "kernels", "busy_ms": "kernels take (ms)"})
    if said is None:
        return Shown(rows, f"{path}: kernels by phase and kind.")
    return recorded.shown(rows, f"{TIMED[otherwise].describe()}: the twelve largest rows", said)


def added(folder: str = HOME) -> pd.DataFrame:
    """What `figures.waiting` wants: recipe, says, added_ratio."""
    rows = recorded.table("05-sync-costs", folder)
    plain = rows[rows["habit"] == "plain"].set_index("recipe")["time_ms"]
    names = {"fp32": "fp32, batch 8", "bf16-sdpa": "bf16, batch 8", "bf16-sdpa-1": "bf16, batch 1"}
    out = rows.assign(added_ratio=rows["time_ms"] / rows["recipe"].map(plain) - 1, recipe=rows["recipe"].map(names))
    return out[out["habit"] != "plain"]


def leads(folder: str = HOME) -> dict[str, pd.DataFrame]:
    """What `figures.lead` wants, for fp32 and bf16."""
    return {name: recorded.of("05-host-lead", folder, recipe=name) for name in ("fp32", "bf16-sdpa")}


def loader_strips(folder: str = HOME) -> dict[str, pd.DataFrame]:
    """What `figures.late_loader` wants."""
    return {"prompt": lanes("loader-prompt", folder), "20 ms late": lanes("loader-late", folder)}
