"""What each line of the training loop costs: the tables of notebook 01."""

from __future__ import annotations

import math

import pandas as pd
import torch

from gpt2.memory.ledger import Ledger
from gpt2.memory.trace import Category, Trace
from gpt2.model import GPT2, size
from gpt2.step import PHASES
from gpt2.study import runs, tables
from gpt2.study.runs import Beside
from gpt2.study.tables import MIB, Shown

_LINES = {
    ("warmup", 0): "a warm-up matmul",
    ("model", 0): "model.cuda()",
    ("optimizer init", 0): "creating the optimizer",
    ("batch", 0): "batch.cuda()",
    ("optimizer", 1): "first optimizer.step()",
    ("optimizer", 2): "second optimizer.step()",
    ("zero_grad", 1): "zero_grad(set_to_none=True)",
}
_CODE = {
    "forward": "model(x, y)",
    "backward": "loss.backward()",
    "del logits": "del logits",
    "optimizer": "optimizer.step()",
    "zero_grad": "optimizer.zero_grad()",
    "clip": "clip_grad_norm_",
}


def lines(trace: Trace, steps: int = 2) -> pd.DataFrame:
    """`memory_allocated()` after each line of the set-up and of the first steps, and what the line changed.

    Columns: line, step, phase, change_bytes, allocated_bytes.
    """
    rows, before = [], 0
    for mark in trace.marks:
        if mark.step <= steps and mark.name in PHASES:  # readings of hooks lie between the lines
            name = _LINES.get((mark.name, mark.step)) or f"{_CODE.get(mark.name, mark.name)}, step {mark.step}"
            rows.append((name, mark.step, mark.name, mark.allocated_bytes - before, mark.allocated_bytes))
            before = mark.allocated_bytes
    return pd.DataFrame(rows, columns=["line", "step", "phase", "change_bytes", "allocated_bytes"])


def line_by_line(beside: Beside) -> Shown:
    """The two steps line by line, published, predicted and recorded; saved as 01-line-by-line."""
    tables.save("01-line-by-line", beside, lines)
    article = tables.published("01-line-by-line").set_index("line")["change_mib"].to_dict()
    table = tables.beside(beside, lines, ["line", "step"], "change_bytes", article=article)
    return Shown(table, tables.caption("Change of memory allocated after each line", beside, article=True))


def staircase_rows(beside: Beside) -> pd.DataFrame:
    """The same, tidy, as `figures.staircase` wants it."""
    parts = []
    for trace in beside.traces():
        kind, gpu = runs.source(trace).split(" ", 1)
        parts.append(lines(trace).assign(kind=kind, gpu=gpu))
    if tables.is_published(beside.predicted):
        rows = tables.published("01-line-by-line")
        parts.insert(
            1,
            pd.DataFrame(
                {
                    "line": rows["line"],
                    "kind": "published",
                    "gpu": "A40",
                    "change_bytes": rows["change_mib"] * MIB,
                    "allocated_bytes": None,
                }
            ),
        )
    parts = [part.astype({"allocated_bytes": "float64"}) for part in parts]
    return pd.concat(parts, ignore_index=True)


def states(trace: Trace) -> pd.DataFrame:
    """What belongs to the parameters once all of it exists: after the first update, before gradients go.

    Columns: what, size_bytes, bytes_per_parameter. Counted in the trace: the owners' requests, no formula.
    """
    moment = next(mark for mark in trace.marks if (mark.name, mark.step) == ("optimizer", 1)).event_count - 1
    ledger = Ledger(trace)
    sums = dict.fromkeys(("weights", "gradients", "Adam m", "Adam v"), 0)
    for block, category in zip(ledger.blocks, ledger.categories, strict=True):
        if block.born <= moment and (block.died is None or block.died > moment):
            name = {
                Category.PARAMETERS: "weights",
                Category.GRADIENTS: "gradients",
                Category.OPTIMIZER: "Adam m" if block.event.module.endswith(":exp_avg") else "Adam v",
            }.get(category)
            if name:
                sums[name] += block.event.requested_bytes
    sums["total"] = sum(sums.values())
    table = pd.DataFrame({"what": sums.keys(), "size_bytes": sums.values()})
    return table.assign(bytes_per_parameter=table["size_bytes"] / parameter_count(trace))


def parameter_count(trace: Trace) -> int:
    """Trained numbers, from the storages the trace saw: four bytes each, the tied head once."""
    return (
        sum(
            b.event.requested_bytes
            for b in trace.blocks()
            if b.event.category == Category.PARAMETERS.value and b.event.step == 0
        )
        // 4
    )


def sixteen_bytes(beside: Beside) -> Shown:
    """Bytes per parameter by owner; saved as 01-sixteen-bytes."""
    tables.save("01-sixteen-bytes", beside, states)
    article = tables.published("01-sixteen-bytes").set_index("what")["size_mib"].to_dict()
    table = tables.beside(beside, states, ["what"], "size_bytes", article=article)
    table.insert(1, "bytes per parameter", states(beside.predicted)["bytes_per_parameter"].astype(int))
    return Shown(table, tables.caption("Owned by the parameters after the first update", beside, article=True))


def peaks(trace: Trace) -> pd.DataFrame:
    """The peak of each step by owner. Columns: owner, step_1_bytes, step_2_bytes, change_bytes; last the total."""
    ledger = Ledger(trace)
    first, second = (ledger.at(trace.peak({step})).set_index("category")["allocated_bytes"] for step in (1, 2))
    table = pd.DataFrame({"owner": first.index, "step_1_bytes": first.to_numpy(), "step_2_bytes": second.to_numpy()})
    table.loc[len(table)] = ["total", *table[["step_1_bytes", "step_2_bytes"]].sum()]
    return table.assign(change_bytes=table["step_2_bytes"] - table["step_1_bytes"])


def first_step(beside: Beside) -> Shown:
    """Why step 1 is not representative: both peaks by owner; saved as 01-first-step."""
    tables.save("01-first-step", beside, peaks)
    table = peaks(beside.predicted)
    shown = pd.DataFrame({"owner": table["owner"]})
    name = runs.source(beside.predicted)
    for column, head in (("step_1_bytes", "step 1"), ("step_2_bytes", "step 2"), ("change_bytes", "difference")):
        shown[f"{head}, {name} (MiB)"] = table[column] / MIB
    if beside.recorded is not None:
        shown[f"difference, {runs.source(beside.recorded)} (MiB)"] = peaks(beside.recorded)["change_bytes"] / MIB
    return Shown(shown, tables.caption("Owners at the peak of step 1 and of step 2", beside))


def tied_head(model: str = "124M") -> Shown:
    """Real parameters on the CPU: where the head's and the embedding's numbers lie, and what counting twice says."""
    gpt2 = GPT2(size(model))
    head, embedding = gpt2.lm_head.weight, gpt2.transformer.wte.weight
    once = sum(p.numel() for p in gpt2.parameters())
    rows = [
        ("head and embedding start at one address", str(head.data_ptr() == embedding.data_ptr())),
        ("they are one storage", str(head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr())),
        ("parameters, each storage once (count)", f"{once:,}"),
        ("parameters, the head counted again (count)", f"{once + head.numel():,}"),
        ("too many by (share)", f"{head.numel() / once:.1%}"),
    ]
    return Shown(pd.DataFrame(rows, columns=["question", "answer"]), f"GPT-2 {model} on the CPU, with real values.")


def first_loss(model: str = "124M", batch: int = 2, length: int = 128, seed: int = 0) -> Shown:
    """The loss of an untrained model on random tokens, computed on the CPU, beside that of a uniform guess."""
    torch.manual_seed(seed)
    gpt2 = GPT2(size(model))
    tokens = torch.randint(0, gpt2.size.vocabulary, (batch, length + 1))
    with torch.no_grad():
        loss = gpt2(tokens[:, :-1], tokens[:, 1:])[1].item()
    uniform = math.log(gpt2.size.vocabulary)
    rows = [("a uniform guess, ln of the vocabulary", uniform), ("untrained model, here", round(loss, 2))]
    rows.append(("untrained model, published", tables.number("first_loss")))
    table = pd.DataFrame(rows, columns=["source", "loss (nats)"])
    return Shown(
        table.assign(**{"above uniform (nats)": table["loss (nats)"] - uniform}),
        f"Cross-entropy of GPT-2 {model} before training: {batch} x {length} random tokens, on the CPU, fp32.",
    )


def lazy_state(beside: Beside) -> str:
    """When Adam's moments are made: a sentence, counted in the trace."""
    trace, ledger = beside.predicted, Ledger(beside.predicted)
    born = [b.event for b, c in zip(ledger.blocks, ledger.categories, strict=True) if c is Category.OPTIMIZER]
    places = sorted({(event.step, event.phase) for event in born})
    size_mib = sum(event.requested_bytes for event in born) / MIB
    where = " and ".join(f"{phase}, step {step}" for step, phase in places)
    return f"{len(born)} tensors of Adam's state, {size_mib:,.1f} MiB, all made in: {where} ({runs.source(trace)})"
