"""The questions that the first article leaves open, closed with evidence from traces.

Each function turns one trace of the baseline into a tidy table. Lines of code are known where the trace has stacks.
"""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import pandas as pd

from gpt2.memory.ledger import Ledger
from gpt2.memory.trace import Block, Category, Trace
from gpt2.study import runs, tables
from gpt2.study.figures.step import allocated, window
from gpt2.study.runs import Beside
from gpt2.study.tables import MIB, Shown

STEP = 2
BLOCK = re.compile(r"(?:transformer\.)?h\.(\d+)\b")
MODEL = Path(__file__).parents[2] / "model.py"


# --- which threads made the two workspaces --------------------------------------------------------------------------


def workspaces(trace: Trace) -> pd.DataFrame:
    """Blocks of libraries that are never given back. Columns: size_bytes, step, phase, thread, first_use, module."""
    ledger, rows = Ledger(trace), []
    for block, category in zip(ledger.blocks, ledger.categories, strict=True):
        if category is Category.WORKSPACE and block.died is None:
            event = block.event
            thread = "autograd engine's" if event.phase == "backward" else "main"
            rows.append((event.requested_bytes, event.step, event.phase, thread, _before(trace, block), event.module))
    return pd.DataFrame(rows, columns=["size_bytes", "step", "phase", "thread", "first_use", "module"])


def _before(trace: Trace, block: Block) -> str:
    """The operator whose output was made just before a library asked: it was the first to need the library."""
    event = trace.events[block.born]
    if event.operator.startswith("aten."):
        return event.operator
    return next((e.operator for e in reversed(trace.events[: block.born]) if e.action == "alloc"), "")


# --- which blocks hold the last 6 MiB -------------------------------------------------------------------------------


def slack(trace: Trace) -> pd.DataFrame:
    """Blocks larger than what was asked, at the peak of step 2.

    Columns: tensor, category, requested_bytes, block_bytes, slack_bytes, why.
    """
    ledger, peak, rows = Ledger(trace), trace.peak({STEP}), []
    for block, category in zip(ledger.blocks, ledger.categories, strict=True):
        event, over = block.event, block.event.block_bytes - block.event.requested_bytes
        if over and block.born <= peak and (block.died is None or block.died > peak):
            why = "rounded up to 512 bytes" if over < 512 else "what was left over, 1 MiB or less, is not split off"
            name = event.module if event.category else f"{event.operator} {list(event.shape)}"
            rows.append((name, category.value, event.requested_bytes, event.block_bytes, over, why))
    table = pd.DataFrame(rows, columns=["tensor", "category", "requested_bytes", "block_bytes", "slack_bytes", "why"])
    return table.sort_values(["slack_bytes", "tensor"], ascending=[False, True], ignore_index=True)


# --- the spike inside each block ------------------------------------------------------------------------------------


def block_windows(trace: Trace) -> dict[int, tuple[int, int]]:
    """First and past-the-last event of each block's forward in step 2, by its number from 1."""
    first, past = window(trace, STEP)
    found: dict[int, list[int]] = {}
    order: list[tuple[int, int]] = []  # (event, block or 0) of each allocation
    for i in range(first, past):
        event = trace.events[i]
        if event.action == "alloc" and event.phase == "forward":
            match = BLOCK.search(event.module)
            order.append((i, int(match[1]) + 1 if match else 0))
    for i, number in order:
        if number:
            found.setdefault(number, [i, i])
    starts = [(span[0], number) for number, span in found.items()]
    after = next(i for i, number in order if not number and i > max(starts)[0])
    ends = [start for start, _ in starts[1:]] + [after]
    return {number: (start, end) for (start, number), end in zip(starts, ends, strict=True)}


def spikes(trace: Trace) -> pd.DataFrame:
    """How far each block's forward rises above its own end. Columns: block, kept_bytes, spike_bytes."""
    curve, rows = allocated(trace), []
    for number, (start, end) in block_windows(trace).items():
        rows.append((number, curve[end - 1] - curve[start - 1], max(curve[start:end]) - curve[end - 1]))
    return pd.DataFrame(rows, columns=["block", "kept_bytes", "spike_bytes"])


def spike(trace: Trace, number: int = 1) -> pd.DataFrame:
    """The spike of one block, tensor by tensor: what is alive at its top and gone at the block's end, less what the
    block makes after the top and keeps. The rows sum to the spike.

    Columns: tensor, line, shape, change_bytes.
    """
    curve, (start, end) = allocated(trace), block_windows(trace)[number]
    top = max(range(start, end), key=lambda i: (curve[i], -i))
    rows = []
    for block in trace.blocks():
        if start <= block.born < end:
            at_top = block.born <= top and (block.died is None or block.died > top)
            at_end = block.died is None or block.died >= end
            if at_top != at_end:
                event = block.event
                rows.append(
                    (
                        _name(event),
                        line_of(trace, event),
                        " x ".join(map(str, event.shape)),
                        event.block_bytes if at_top else -event.block_bytes,
                    )
                )
    table = pd.DataFrame(rows, columns=["tensor", "line", "shape", "change_bytes"])
    return table.sort_values("change_bytes", ascending=False, kind="stable", ignore_index=True)


def line_of(trace: Trace, event) -> str:
    """The line of model.py that asked, number and text; "" where the trace has no stacks."""
    stack = trace.stacks[event.stack] if event.stack >= 0 else ()
    frame = next((f for f in stack if Path(f.file).name == MODEL.name and Path(f.file).parent.name == "gpt2"), None)
    return f"{frame.line}: {linecache.getline(str(MODEL), frame.line).strip()}" if frame else ""


def _name(event) -> str:
    where = event.module.rpartition(".")[2]
    return f"{event.operator.removeprefix('aten.')} in {where if not where.isdigit() else 'block'}"


# --- gradients that arrive block by block, and late -----------------------------------------------------------------


def gradients(trace: Trace) -> pd.DataFrame:
    """What ends up in .grad in step 2, in order of arrival. Columns: arrives, tensor_count, size_bytes, first_event."""
    first, _ = window(trace, STEP)
    rows: dict[str, list[int]] = {}
    for block in trace.blocks():
        event = block.event
        if event.step == STEP and event.category == Category.GRADIENTS.value:
            match = BLOCK.search(event.module)
            late = "wte" in event.module or "wpe" in event.module
            name = f"block {int(match[1]) + 1}" if match else "embeddings" if late else "final norm"
            row = rows.setdefault(name, [0, 0, block.born - first + 1])
            row[0], row[1] = row[0] + 1, row[1] + event.requested_bytes
    return pd.DataFrame(
        [(name, *row) for name, row in rows.items()], columns=["arrives", "tensor_count", "size_bytes", "first_event"]
    )


def tied_gradient(trace: Trace) -> pd.DataFrame:
    """The three tensors as large as the embedding that backward makes. Columns: tensor, made_by, from_event, to_event,
    size_bytes; events count from 1 at the step's first."""
    (first, _), rows = window(trace, STEP), []
    parameter = max(b.event.requested_bytes for b in trace.blocks() if b.event.category == Category.PARAMETERS.value)
    names = {
        "aten.mm": "the head's half",
        "aten.embedding_dense_backward": "the embedding's half",
        "aten.add": "their sum, in .grad",
    }
    for block in trace.blocks():
        event = block.event
        if event.step == STEP and event.phase == "backward" and event.requested_bytes == parameter:
            rows.append(
                (
                    names.get(event.operator, event.operator),
                    event.operator,
                    block.born - first + 1,
                    block.died - first + 1,
                    event.requested_bytes,
                )
            )
    return pd.DataFrame(rows, columns=["tensor", "made_by", "from_event", "to_event", "size_bytes"])


# --- before block 1, inside attention, after backward ---------------------------------------------------------------


def before_block_1(trace: Trace) -> pd.DataFrame:
    """What step 2 has made when its first block begins. Columns: tensor, line, size_bytes, dies."""
    start, _ = block_windows(trace)[1]
    return _lives(trace, lambda block: block.born < start and (block.died is None or block.died >= start), STEP)


def query_key_value(trace: Trace, number: int = 1) -> pd.DataFrame:
    """What attention makes of c_x, with how long each lives. Columns: tensor, line, size_bytes, dies."""
    start, end = block_windows(trace)[number]
    made = {"aten.addmm": ".c_attn", "aten.clone": ".attn"}

    def wanted(block: Block) -> bool:
        event = block.event
        return (
            start <= block.born < end and bool(event.shape) and event.module.endswith(made.get(event.operator, "-"))
        )

    names = ("c_x", "q in one piece", "k in one piece", "v in one piece", "output in one piece")
    table = _lives(trace, wanted, STEP)
    return table.assign(tensor=list(names)) if len(table) == len(names) else table


def _lives(trace: Trace, wanted, step: int) -> pd.DataFrame:
    rows = []
    for block in trace.blocks():
        if block.event.step == step and wanted(block):
            rows.append(
                (_name(block.event), line_of(trace, block.event), block.event.requested_bytes, _end(trace, block))
            )
    return pd.DataFrame(rows, columns=["tensor", "line", "size_bytes", "dies"])


def _end(trace: Trace, block: Block) -> str:
    if block.died is None:
        return "never"
    phase = trace.events[block.died].phase
    windows = block_windows(trace)
    inside = next((n for n, (start, end) in windows.items() if start <= block.died < end), None)
    return f"{phase}, in block {inside}" if inside and phase == "forward" else phase


# --- as a notebook shows them ---------------------------------------------------------------------------------------


def show_workspaces(beside: Beside) -> Shown:
    """Saved as 03-workspaces."""
    return _stacked("03-workspaces", beside, workspaces, "Library workspaces that are never given back")


def show_slack(beside: Beside) -> Shown:
    """Saved as 03-slack."""
    tables.save("03-slack", beside, slack)
    table = slack(beside.predicted)
    table.loc[len(table)] = ["total", "", *table[["requested_bytes", "block_bytes", "slack_bytes"]].sum(), ""]
    total = table["slack_bytes"].iloc[-1] / MIB
    return Shown(_spaced(table), tables.caption(f"Slack at the peak by block, {total:.2f} MiB in all", beside))


def show_spikes(beside: Beside) -> Shown:
    """Each block's spike, all alike; saved as 03-spikes."""
    tables.save("03-spikes", beside, spikes)
    article = dict.fromkeys(range(1, 13), _detail("forward_spike")) if tables.is_published(beside.predicted) else None
    table = tables.beside(beside, spikes, ["block"], "spike_bytes", article=article)
    return Shown(table, tables.caption("How far each block's forward rises above its own end", beside, article=True))


def show_spike(beside: Beside) -> Shown:
    """Saved as 03-spike: only the prediction knows the lines."""
    trace = beside.predicted
    table = tables.keep("03-spike", trace, spike(trace)).copy()
    table.loc[len(table)] = ["spike", "", "", table["change_bytes"].sum()]
    table["change (MiB)"] = table.pop("change_bytes") / MIB
    words = "Alive at the top of block 1 and gone at its end, less what it makes later"
    return Shown(table, f"{words}. {runs.source(trace)}.")


def show_gradients(beside: Beside) -> Shown:
    """Saved as 03-gradients."""
    tables.save("03-gradients", beside, gradients)
    article = {f"block {n}": _detail("gradient_growth") for n in range(1, 13)}
    article["embeddings"] = _detail("late_gradient")
    table = tables.beside(beside, gradients, ["arrives"], "size_bytes", article=article)
    return Shown(table, tables.caption("Gradients in order of arrival, step 2", beside, article=True))


def show_tied_gradient(beside: Beside) -> Shown:
    """Saved as 03-tied-gradient."""
    return _stacked("03-tied-gradient", beside, tied_gradient, "Tensors of backward as large as the embedding")


def show_before_block_1(beside: Beside) -> Shown:
    """Saved as 03-before-block-1."""
    trace = beside.predicted
    table = tables.keep("03-before-block-1", trace, before_block_1(trace)).copy()
    table.loc[len(table)] = ["together", "", table["size_bytes"].sum(), ""]
    table.insert(2, "size (MiB)", table.pop("size_bytes") / MIB)
    return Shown(table, f"Made by step 2 before block 1, and the phase in which each dies. {runs.source(trace)}.")


def show_query_key_value(beside: Beside) -> Shown:
    """Saved as 03-query-key-value."""
    trace = beside.predicted
    table = tables.keep("03-query-key-value", trace, query_key_value(trace)).copy()
    table.insert(2, "size (MiB)", table.pop("size_bytes") / MIB)
    return Shown(
        table,
        f"What attention of block 1 makes of its input, and the phase in which each dies. {runs.source(trace)}.",
    )


def logits_name(trace: Trace) -> pd.DataFrame:
    """Peak and what is left after backward. Columns: reading, size_bytes."""
    after = next(m for m in trace.marks if (m.name, m.step) == ("backward", STEP)).allocated_bytes
    return pd.DataFrame(
        [("peak", max(m.max_allocated_bytes for m in trace.marks if m.step == STEP)), ("after backward", after)],
        columns=["reading", "size_bytes"],
    )


def show_logits(kept: Beside, dropped: Beside) -> Shown:
    """The name `logits` kept until after backward, and dropped before it; saved as 03-logits and 03-logits-dropped."""
    parts = []
    for words, beside in (("kept until after backward", kept), ("dropped before backward", dropped)):
        tables.save("03-logits" if beside is kept else "03-logits-dropped", beside, logits_name)
        table = tables.beside(beside, logits_name, ["reading"], "size_bytes")
        table.insert(0, "the name `logits` is", words)
        parts.append(table)
    return Shown(pd.concat(parts, ignore_index=True), tables.caption("What one name costs", kept))


def _detail(name: str) -> float:
    return float(tables.published("03-details").set_index("detail").loc[name, "value"])


def _stacked(name: str, beside: Beside, rows, what: str) -> Shown:
    """The rows of every trace under each other, with the run in front."""
    tables.save(name, beside, rows)
    parts = [rows(trace) for trace in beside.traces()]
    for part, trace in zip(parts, beside.traces(), strict=True):
        part.insert(0, "run", runs.source(trace))
    return Shown(_spaced(pd.concat(parts, ignore_index=True)), tables.caption(what, beside))


def _spaced(table: pd.DataFrame) -> pd.DataFrame:
    """Column names as readers like them: `size_bytes` is `size (bytes)`."""

    def words(name: str) -> str:
        unit = " (bytes)" if name.endswith("_bytes") else ""
        return name.removesuffix("_bytes").replace("_", " ") + unit

    return table.rename(columns=words)
