"""What forward keeps for backward: the tables of notebook 02."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pandas as pd
import torch
from torch import nn
from torch.nn import functional as F

from gpt2.memory import formulas
from gpt2.memory.ledger import Ledger
from gpt2.memory.saved import saved_tensors
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.trace import Category, Trace
from gpt2.model import Block
from gpt2.step import Recipe
from gpt2.study import hooks, runs, tables
from gpt2.study.findings import questions
from gpt2.study.runs import Beside
from gpt2.study.tables import MIB, Shown

STEP = 2
# What autograd keeps of an fp32 block with explicit attention, in the order it keeps it: our name, the published row.
_KEPT = (
    ("LayerNorm 1 input", "LayerNorm 1 input and output"),
    ("LayerNorm 1 mean", ""),
    ("LayerNorm 1 1/std", ""),
    ("LayerNorm 1 output", "LayerNorm 1 input and output"),
    ("k in one piece", "combined query, key and value"),
    ("q in one piece", "combined query, key and value"),
    ("causal mask comparison", "causal mask comparison, bool"),
    ("attention probabilities", "attention probabilities"),
    ("v in one piece", "combined query, key and value"),
    ("attention output", "attention output, before projection"),
    ("LayerNorm 2 input", "LayerNorm 2 input and output"),
    ("LayerNorm 2 mean", ""),
    ("LayerNorm 2 1/std", ""),
    ("LayerNorm 2 output", "LayerNorm 2 input and output"),
    ("MLP hidden, before GELU", "MLP hidden, before and after GELU"),
    ("MLP hidden, after GELU", "MLP hidden, before and after GELU"),
)
_STATISTICS = "LayerNorm means and deviations"


def block_saved(recipe: Recipe, gpu: str, torch_release: str) -> pd.DataFrame:
    """What one fp32 block with explicit attention keeps, counted by hooks on autograd.

    Columns: tensor, published_row, kept_by (the module that needs it), shape, dtype, saved_bytes.
    """
    with SimulatedGpu(gpu, torch=torch_release):
        block = Block(recipe.size, "explicit", 0.0).cuda()
        x = torch.empty(recipe.batch, recipe.length, recipe.size.width, device="cuda", requires_grad=True)
        found = saved_tensors(block, x)
    names = pd.DataFrame(_KEPT, columns=["tensor", "published_row"])
    kept = found[["module", "shape", "dtype", "storage_bytes"]]
    kept = kept.rename(columns={"module": "kept_by", "storage_bytes": "saved_bytes"})
    return pd.concat([names, kept], axis=1)


def show_block_saved(recipe: Recipe, here: Beside) -> Shown:
    """Tensor by tensor; saved as 02-block-saved."""
    table = tables.keep("02-block-saved", here.predicted, _saved(recipe, here).assign(shape=_shapes)).copy()
    table["size (MiB)"] = table.pop("saved_bytes") / MIB
    table.loc[len(table)] = ["total", "", "", "", "", table["size (MiB)"].sum()]
    table = table.drop(columns="published_row").rename(columns={"kept_by": "kept by"})
    return Shown(table, f"What autograd keeps of one block, each storage once. {runs.source(here.predicted)}.")


def show_block_published(recipe: Recipe, here: Beside) -> Shown:
    """The same, in the rows that were published, beside the formula."""
    kept = _saved(recipe, here)
    kept["row"] = kept["published_row"].where(kept["published_row"] != "", _STATISTICS)
    sums = kept.groupby("row", sort=False)["saved_bytes"].sum()
    rows = tables.published("02-block-saved").set_index("tensor")["size_mib"].drop("total")
    table = pd.DataFrame({"tensors": [*rows.index, _STATISTICS]})
    table["published A40 (MiB)"] = [*rows, None] if tables.is_published(here.predicted) else None
    table["counted (MiB)"] = [sums[name] / MIB for name in table["tensors"]]
    counted, said = table["counted (MiB)"].sum(), 769 if tables.is_published(here.predicted) else None
    table.loc[len(table)] = ["one block", said, counted]
    total = formulas.total(formulas.block_saved(recipe.size, recipe.batch, recipe.length)) / MIB
    table.loc[len(table)] = ["one block, by formula", None, total]
    return Shown(table, "What one block keeps: published for the A40, and counted here by hooks.")


def figure_rows(recipe: Recipe, here: Beside) -> pd.DataFrame:
    """The counted tensors for `figures.saved_tensors`, the four statistics as one bar."""
    kept = _saved(recipe, here)
    small = kept["published_row"] == ""
    rows = kept.loc[~small, ["tensor", "shape", "saved_bytes"]]
    count = f"{small.sum()} of {recipe.batch} x {recipe.length:,} x 1"
    rows.loc[len(kept)] = [_STATISTICS, count, kept.loc[small, "saved_bytes"].sum()]
    return rows


def _saved(recipe: Recipe, here: Beside) -> pd.DataFrame:
    return block_saved(recipe, here.predicted.meta["gpu"], runs.release(here.predicted))


def _shapes(table: pd.DataFrame) -> pd.Series:
    return table["shape"].map(_times)


# --- the whole forward ------------------------------------------------------------------------------------------------


def activations(trace: Trace) -> pd.DataFrame:
    """Activations alive at the peak of step 2: each block, all blocks, the two ends. Columns: part, size_bytes."""
    ledger, peak = Ledger(trace), trace.peak({STEP})
    sums: dict[str, int] = {}
    for block, category in zip(ledger.blocks, ledger.categories, strict=True):
        if category is Category.ACTIVATIONS and block.born <= peak and (block.died is None or block.died > peak):
            match = questions.BLOCK.search(block.event.module)
            name = f"block {int(match[1]) + 1}" if match else "embedding sum, final norm, loss"
            sums[name] = sums.get(name, 0) + block.event.requested_bytes
    blocks = {name: size for name, size in sums.items() if name.startswith("block")}
    rows = [("block 1", blocks["block 1"]), ("largest block", max(blocks.values()))]
    rows += [("smallest block", min(blocks.values())), ("all blocks", sum(blocks.values()))]
    rows += [("embedding sum, final norm, loss", sum(sums.values()) - sum(blocks.values()))]
    return pd.DataFrame([*rows, ("activations", sum(sums.values()))], columns=["part", "size_bytes"])


def show_activations(here: Beside) -> Shown:
    """Saved as 02-activations."""
    tables.save("02-activations", here, activations)
    article = {"block 1": "block_measured", "all blocks": "blocks_predicted"}
    article |= {"embedding sum, final norm, loss": "ends_predicted", "activations": "activations_measured"}
    article = {part: tables.number(name) for part, name in article.items()}
    table = tables.beside(here, activations, ["part"], "size_bytes", article=article)
    return Shown(table, tables.caption("Activations alive at the peak of step 2", here, article=True))


def readings(trace: Trace) -> pd.DataFrame:
    """The readings of step 2 in order. Columns: reading, name, bytes of each owner, allocated_bytes."""
    marks, timeline = hooks.of_step(trace, STEP), Ledger(trace).timeline()
    rows = timeline.iloc[[mark.event_count - 1 for mark in marks]].reset_index(drop=True)
    owners = [c.value for c in Category if c.value in rows]
    table = rows[owners].rename(columns=lambda name: f"{name.replace(' ', '_')}_bytes")
    table.insert(0, "reading", range(1, len(marks) + 1))
    table.insert(1, "name", [mark.name for mark in marks])
    return table.assign(allocated_bytes=[mark.allocated_bytes for mark in marks])


def show_readings(here: Beside) -> Shown:
    """Moments of the 55 readings; all are saved as 02-readings."""
    tables.save("02-readings", runs.recorded_readings(here), readings)
    table = readings(here.predicted)
    ends = table["name"].str.contains(r"block (?:1|2|12),") | ~table["name"].str.contains("block")
    shown = table[ends][["reading", "name", "activations_bytes", "loss_bytes", "gradients_bytes", "allocated_bytes"]]
    shown = shown.set_index(["reading", "name"]).div(MIB).reset_index()
    shown.columns = ["reading", "name", *(f"{n} (MiB)" for n in ("activations", "loss", "gradients", "allocated"))]
    seen = runs.recorded_readings(here)
    if seen.recorded is not None:
        theirs, ours = (readings(trace).set_index("name")["allocated_bytes"] for trace in (seen.recorded, seen.twin))
        shown[f"allocated, {runs.source(seen.recorded)} (MiB)"] = theirs.reindex(shown["name"]).to_numpy() / MIB
        shown["recorded less predicted H200 (bytes)"] = (theirs - ours).reindex(shown["name"]).to_numpy()
    return Shown(shown, tables.caption(f"Some of the {len(table)} readings of step 2", seen))


# --- what each operator keeps -----------------------------------------------------------------------------------------


class _Call(nn.Module):
    """A function as a module, so that hooks can follow it."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def operators(batch: int = 8, length: int = 1024, width: int = 768, heads: int = 12) -> pd.DataFrame:
    """What autograd keeps for each operator of the model. Columns: operator, keeps, kept_bytes, input_bytes."""
    x, scores, qkv = (batch, length, width), (batch, heads, length, length), (batch, heads, length, width // heads)
    linear, norm = nn.Linear(width, width), nn.LayerNorm(width)
    cases = (
        ("linear", linear, (x,)),
        ("GELU", nn.GELU(approximate="tanh"), (x,)),
        ("layer norm", norm, (x,)),
        ("residual sum", _Call(torch.add), (x, x)),
        ("dropout", nn.Dropout(0.1), (x,)),
        ("product of two matrices", _Call(torch.matmul), (scores, qkv)),
        ("scaling by a number", _Call(lambda t: t * 0.125), (scores,)),
        (
            "masked fill",
            _Call(lambda t: t.masked_fill(torch.ones(length, length, device="cuda") == 0, 0.0)),
            (scores,),
        ),
        ("softmax", nn.Softmax(-1), (scores,)),
        (
            "fused attention",
            _Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
            (qkv,) * 3,
        ),
    )
    rows = []
    with SimulatedGpu("A40"):
        for name, module, shapes in cases:
            inputs = [torch.empty(shape, device="cuda", requires_grad=True) for shape in shapes]
            kept = saved_tensors(module.cuda(), *inputs)
            words = "; ".join(f"{_times(row.shape)} {row.dtype}" for row in kept.itertuples()) or "nothing"
            rows.append((name, words, int(kept["storage_bytes"].sum()), sum(t.nbytes for t in inputs)))
    return pd.DataFrame(rows, columns=["operator", "keeps", "kept_bytes", "input_bytes"])


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "1"


def show_operators(here: Beside) -> Shown:
    """Saved as 02-operators."""
    table = tables.keep("02-operators", here.predicted, operators()).copy()
    table["kept (MiB)"], table["inputs (MiB)"] = table.pop("kept_bytes") / MIB, table.pop("input_bytes") / MIB
    return Shown(table, "What autograd keeps for one operator at 8 x 1,024 x 768 and 12 heads, fp32. Predicted.")


# --- the rule of 34 s·b·h ---------------------------------------------------------------------------------------------


def sixteen_bits(recipe: Recipe) -> pd.DataFrame:
    """One block in 16 bits, fused attention: the rule and two counts. Columns: block, kept_bytes, bytes_per_sbh."""
    unit = recipe.tokens * recipe.size.width
    rows = [("the rule: 34·s·b·h", formulas.layer_16bit(recipe.size, recipe.batch, recipe.length))]
    cases = (
        ("all in bf16, dropout 0.1", torch.bfloat16, False, 0.1),
        ("all in bf16, no dropout", torch.bfloat16, False, 0.0),
        ("bf16 autocast, dropout 0.1", torch.float32, True, 0.1),
        ("bf16 autocast, no dropout", torch.float32, True, 0.0),
    )
    with SimulatedGpu("A40"):
        for name, dtype, autocast, dropout in cases:
            block = Block(recipe.size, "sdpa", dropout).cuda().to(dtype)
            shape = (recipe.batch, recipe.length, recipe.size.width)
            x = torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True)
            with torch.autocast("cuda", dtype=torch.bfloat16) if autocast else nullcontext():
                rows.append((name, int(saved_tensors(block, x)["storage_bytes"].sum())))
    table = pd.DataFrame(rows, columns=["block", "kept_bytes"])
    return table.assign(bytes_per_sbh=table["kept_bytes"] / unit)


def show_sixteen_bits(recipe: Recipe, here: Beside) -> Shown:
    """Saved as 02-sixteen-bits."""
    table = tables.keep("02-sixteen-bits", here.predicted, sixteen_bits(recipe)).copy()
    table.insert(1, "kept (MiB)", table.pop("kept_bytes") / MIB)
    table = table.rename(columns={"bytes_per_sbh": "bytes per s·b·h"})
    return Shown(
        table, "What one block keeps in 16 bits with fused attention. The rule is published, the rest predicted."
    )


# --- growth with the sequence -----------------------------------------------------------------------------------------


def split(trace: Trace) -> tuple[int, int]:
    """Bytes that block 1 keeps: those that grow with T, and the two tensors that grow with T².

    ValueError if the block keeps no such tensors.
    """
    recipe = runs.of_trace(trace)
    T, (start, end) = recipe.length, questions.block_windows(trace)[1]
    lives = [block for block in trace.blocks() if start <= block.born < end]
    kept = [b.event.requested_bytes for b in lives if b.died is None or b.died >= end]
    squares = (4 * recipe.batch * recipe.size.heads * T * T, T * T)
    if not set(squares) <= set(kept):
        raise ValueError("block 1 keeps no attention probabilities or no mask comparison")
    return sum(kept) - sum(squares), sum(squares)


def growth(lengths: Sequence[int], gpu: str, torch_release: str) -> pd.DataFrame:
    """What a block keeps over the length, counted on the simulated card, and as recorded where there is a recording.

    Columns: kind, length, linear_bytes, square_bytes.
    """
    rows = []
    for length in lengths:
        kept = block_saved(Recipe(length=length), gpu, torch_release)
        square = kept["tensor"].isin(["attention probabilities", "causal mask comparison"])
        sums = kept.groupby(square)["saved_bytes"].sum()
        rows.append(("predicted", length, int(sums[False]), int(sums[True])))
        found = runs.recorded(runs.of_recipe(Recipe(length=length)).name)
        if found is not None:
            rows.append(("measured", length, *split(found)))
    return pd.DataFrame(rows, columns=["kind", "length", "linear_bytes", "square_bytes"])


def show_growth(table: pd.DataFrame, here: Beside) -> Shown:
    """Saved as 02-growth, what is predicted of it."""
    kinds = {kind: rows.set_index("length") for kind, rows in table.groupby("kind", sort=False)}
    tables.keep("02-growth", here.predicted, table[table["kind"] == "predicted"].drop(columns="kind"))
    shown = pd.DataFrame({"length (tokens)": kinds["predicted"].index})
    for column, words in (("linear_bytes", "with T"), ("square_bytes", "with T²")):
        shown[f"{words} (MiB)"] = kinds["predicted"][column].to_numpy() / MIB
    shown["one block (MiB)"] = shown["with T (MiB)"] + shown["with T² (MiB)"]
    if "measured" in kinds:
        total = kinds["measured"].sum(axis=1, numeric_only=True) / MIB
        shown["recorded H200 (MiB)"] = [total.get(length) for length in shown["length (tokens)"]]
    return Shown(shown, "What one block keeps over the length, batch 8: counted by hooks, and recorded on the H200.")
