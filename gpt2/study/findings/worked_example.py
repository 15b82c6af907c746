"""The 1.3B model on an 80 GB card: the article's estimate, line by line, beside the ledger; verdicts of two cards.

`python -m gpt2.study.findings.worked_example` predicts the verdicts, which take minutes, and writes
results/predicted/80gb/08-verdicts.csv; notebook 08 reads them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pandas as pd

from gpt2.memory import formulas, gpus
from gpt2.memory.answer import answer
from gpt2.memory.ledger import Ledger
from gpt2.memory.trace import Block, Category, Trace
from gpt2.step import Recipe
from gpt2.study import paths, results, runs, tables
from gpt2.study.experiments import EXPERIMENTS, Experiment, predict
from gpt2.study.fit import largest
from gpt2.study.tables import Shown
from gpt2.study.words import parser

GB = 10**9  # the article counts in decimal GB
GIB = 2**30
RELEASE = "2.11.0"
CARDS, BATCHES = ("H100", "A100"), (8, 16)
EXPANDABLE = "expandable_segments:True"
VARIANTS: dict[str, dict] = {
    "as in the article": {},
    "default AdamW instead of fused": {"optimizer": "foreach"},
    "attention written out": {"attention": "explicit"},
    "loss in 8 chunks": {"loss": "chunked"},
    "every block checkpointed": {"checkpoint": "block"},
    "both": {"loss": "chunked", "checkpoint": "block"},
}
_LEDGER = {
    "weights": Category.PARAMETERS,
    "two moments": Category.OPTIMIZER,
    "gradients": Category.GRADIENTS,
    "activations of the layers": Category.ACTIVATIONS,
    "weights cast to 16 bits": Category.ACTIVATIONS,
    "activations outside the layers": Category.ACTIVATIONS,
    "vocabulary-sized tensors": Category.LOSS,
    "workspace, inputs, slack": Category.WORKSPACE,
}


def recipe(batch: int = 8, **changes) -> Recipe:
    """The article's configuration: 2,048 tokens, bf16 autocast, fused attention, fused AdamW."""
    return replace(EXPERIMENTS["1.3B-8"].recipe, batch=batch, **changes)


# --- the estimate and the ledger --------------------------------------------------------------------------------------


def estimate(batch: int) -> dict[str, int]:
    """The article's lines in bytes, under the ledger's names; 0 for what it leaves out."""
    size = recipe().size
    states, layers, logits, gradient = formulas.worked_example(size, batch, recipe().length)
    lines = dict.fromkeys(_LEDGER, 0)
    lines |= {"weights": 4 * states.numel, "two moments": 8 * states.numel, "gradients": 4 * states.numel}
    lines["activations of the layers"] = layers.bytes
    lines["vocabulary-sized tensors"] = logits.bytes + gradient.bytes
    return lines


def counted(trace: Trace) -> dict[str, int]:
    """The same lines as the ledger has them at the peak of the later steps: their sum is `memory_allocated()`."""
    ledger = Ledger(trace)
    index = ledger.peak_owner({2, 3}).index
    owned = ledger.at(index).set_index("category")["allocated_bytes"]
    lines = dict.fromkeys(_LEDGER, 0)
    lines |= {"weights": owned["parameters"], "two moments": owned["optimizer state"], "gradients": owned["gradients"]}
    lines["vocabulary-sized tensors"] = owned["loss"]
    halves = _half_weights(trace)
    for block in _activations(ledger, index):
        lines[_line(block, halves)] += block.event.requested_bytes
    lines["workspace, inputs, slack"] = int(owned.sum()) - sum(lines.values())
    return {name: int(size) for name, size in lines.items()}


def _activations(ledger: Ledger, index: int) -> list[Block]:
    return [b for b, category in zip(ledger.blocks, ledger.categories, strict=True)
            if category is Category.ACTIVATIONS and b.born <= index and (b.died is None or b.died > index)]


def _line(block: Block, halves: set[int]) -> str:
    if _is_cast_weight(block, halves):
        return "weights cast to 16 bits"
    inside = block.event.module.startswith("transformer.h.")
    return "activations of the layers" if inside else "activations outside the layers"


def _half_weights(trace: Trace) -> set[int]:
    """Bytes of the matrices in 16 bits: a recording knows sizes, not shapes. No activation here has one of them."""
    return {e.requested_bytes // 2 for e in trace.events if e.category == "parameters" and e.requested_bytes > 2**20}


def _is_cast_weight(block: Block, halves: set[int]) -> bool:
    casts = ("aten._to_copy", "aten.empty_strided")  # as a prediction and as a recording name a cast
    return block.event.operator in casts and block.event.requested_bytes in halves


def line_by_line(batch: int, gpu: str = "H200", torch_release: str = RELEASE) -> Shown:
    """Estimate, prediction and recording of each line, decimal GB as in the article; saved as 08-line-by-line."""
    here = _beside(batch, gpu, torch_release)
    columns = {"estimate": estimate(batch)} | {runs.source(trace): counted(trace) for trace in here.traces()}
    for trace in here.traces():
        found = counted(trace)
        tables.keep(f"08-batch-{batch}", trace, pd.DataFrame({"line": list(found), "allocated_bytes": found.values()}))
    shown = pd.DataFrame({"line": [*_LEDGER, "peak"]})
    for name, lines in columns.items():
        shown[f"{name} (GB)"] = [*(lines[line] / GB for line in _LEDGER), sum(lines.values()) / GB]
    first = next(iter(columns)), runs.source(here.predicted)
    shown["predicted less estimate (GB)"] = shown[f"{first[1]} (GB)"] - shown[f"{first[0]} (GB)"]
    return Shown(shown, tables.caption(f"Batch {batch} x 2,048 at the peak, GB of 10⁹ bytes", here))


def estimate_rows(batch: int, gpu: str = "H200", torch_release: str = RELEASE) -> pd.DataFrame:
    """The same lines as `figures.estimate` wants them."""
    here = _beside(batch, gpu, torch_release)
    guess, found = estimate(batch), counted(here.predicted)
    recorded = {} if here.recorded is None else counted(here.recorded)
    rows = [(line, category.value, guess[line], found[line], recorded.get(line)) for line, category in _LEDGER.items()]
    return pd.DataFrame(rows, columns=["line", "category", "estimate_bytes", "found_bytes", "recorded_bytes"])


def _beside(batch: int, gpu: str, torch_release: str) -> runs.Beside:
    return runs.beside(EXPERIMENTS.get(f"1.3B-{batch}") or recipe(batch), gpu=gpu, torch_release=torch_release)


def peak_gb(batch: int, gpu: str, torch_release: str = RELEASE) -> float:
    """The peak on a card, in GB of 10⁹ bytes; where it does not fit, as far as it got."""
    return answer(_beside(batch, gpu, torch_release).predicted, owners=False)["peak_allocated_bytes"] / GB


def verdict(batch: int, gpu: str, torch_release: str = RELEASE) -> str:
    """Whether it fits and the peaks to the byte, predicted and recorded: a line for each."""
    lines = [f"batch {batch}:"]
    for trace in _beside(batch, gpu, torch_release).traces():
        found, room = answer(trace, owners=False), trace.meta["capacity_bytes"]
        lines.append(f"{runs.source(trace):>15}: {'fits' if found['fits'] else 'DOES NOT FIT'}, "
                     f"allocated {found['peak_allocated_bytes']:,} bytes, reserved {found['peak_reserved_bytes']:,}, "
                     f"of {room:,} free at start")
    return "\n".join(dict.fromkeys(lines))


# --- 34·s·b·h ---------------------------------------------------------------------------------------------------------

# What the rule counts for one layer, bytes per s·b·h: Korthikanti et al. 2022, section 4.1.
_RULE = {"norm inputs": 4, "input of the q, k, v product": 2, "q, k and v": 6, "input of the attention's projection": 2,
         "input of the MLP's first product": 2, "input of GELU": 8, "input of the MLP's second product": 8,
         "dropout masks": 2}
_OURS = {("", "aten.add"): "norm inputs", ("attn.c_attn", "aten._to_copy"): "input of the q, k, v product",
         ("attn.c_attn", "aten.addmm"): "q, k and v",
         ("attn", "aten._scaled_dot_product_cudnn_attention"): "input of the attention's projection",
         ("attn", "aten._scaled_dot_product_flash_attention"): "input of the attention's projection",
         ("mlp.c_fc", "aten._to_copy"): "input of the MLP's first product", ("mlp.c_fc", "aten.addmm"): "input of GELU",
         ("mlp.gelu", "aten.gelu"): "input of the MLP's second product"}
_REST = "statistics of norms and softmax"


def one_layer(batch: int = 8, gpu: str = "H200", layer: int = 5) -> Shown:
    """What one layer keeps, in bytes per s·b·h: the rule beside the ledger."""
    trace = runs.predicted(EXPERIMENTS[f"1.3B-{batch}"], gpu, RELEASE)
    ledger, prefix = Ledger(trace), f"transformer.h.{layer}"
    unit = recipe(batch).tokens * recipe().size.width
    found: dict[str, float] = defaultdict(float)
    halves = _half_weights(trace)
    for block in _activations(ledger, ledger.peak_owner({2, 3}).index):
        event = block.event
        if (event.module == prefix or event.module.startswith(f"{prefix}.")) and not _is_cast_weight(block, halves):
            place = event.module.removeprefix(prefix).removeprefix("."), event.operator
            found[_OURS.get(place, _REST) if event.requested_bytes >= unit else _REST] += event.requested_bytes / unit
    rows = [(name, float(rule), found.get(name, 0.0)) for name, rule in _RULE.items()]
    rows.append((_REST, 0.0, found[_REST]))
    rows.append(("together", float(sum(_RULE.values())), sum(found.values())))
    table = pd.DataFrame(rows, columns=["kept by one layer", "rule", "ledger"])
    shown = table.rename(columns={"rule": "rule (bytes per s·b·h)", "ledger": "ledger (bytes per s·b·h)"})
    shown["off (bytes per s·b·h)"] = table["ledger"] - table["rule"]
    return Shown(shown, f"Layer {layer} of 24, batch {batch} x 2,048, bf16. Predicted: {gpu}, torch {RELEASE}.")


def vocabulary_sized(batch: int = 8, gpu: str = "H200") -> Shown:
    """The tensors of the loss alive at the peak."""
    trace = runs.predicted(EXPERIMENTS[f"1.3B-{batch}"], gpu, RELEASE)
    ledger = Ledger(trace)
    alive = ledger.entries(ledger.peak_owner({2, 3}).index, None)
    loss = alive[alive["category"] == "loss"].sort_values(["step", "phase"], ascending=[True, False], kind="stable")
    words = {"aten.mm": "logits", "aten._log_softmax": "log-probabilities",
             "aten._to_copy": "log-probabilities once more, in fp32",
             "aten.nll_loss_backward": "gradient of the log-probabilities"}
    shown = pd.DataFrame({"tensor": [words.get(op, op) for op in loss["operator"]], "dtype": loss["dtype"],
                          "size (GB)": loss["requested_bytes"] / GB})
    return Shown(shown.reset_index(drop=True), f"Batch {batch} x 2,048 x 50,000. Predicted: {gpu}, torch {RELEASE}.")


# --- verdicts ---------------------------------------------------------------------------------------------------------


def verdict_rows() -> pd.DataFrame:
    """Every variant on every card at both batches, and the largest batch of each variant. Takes minutes."""
    rows = []
    for card in CARDS:
        for variant, changes in VARIANTS.items():
            found = largest(Experiment("", recipe(8, **changes), steps=2), gpus.find(card), "batch", RELEASE).largest
            for batch in BATCHES:
                trace = predict(Experiment("", recipe(batch, **changes)), card, torch_release=RELEASE)
                row = answer(trace, owners=False)
                rows.append({"gpu": card, "variant": variant, "batch_count": batch, "fits": row["fits"],
                             "peak_allocated_bytes": row["peak_allocated_bytes"],
                             "peak_reserved_bytes": row["peak_reserved_bytes"],
                             "fails_phase": (row["out_of_memory"] or {}).get("phase"), "largest_batch_count": found})
    return pd.DataFrame(rows)


def verdicts() -> Shown:
    """Which variant fits which 80 GB card: the table that `python -m gpt2.study.findings.worked_example` made."""
    path = "predicted/80gb/08-verdicts.csv"
    try:
        found = results.load_table(path)
    except FileNotFoundError:
        found = results.load_table(paths.ROOT / "results" / path)
    shown = found[found["gpu"] == CARDS[0]][["variant"]].drop_duplicates().reset_index(drop=True)
    for card in CARDS:
        for batch in BATCHES:
            rows = found[(found["gpu"] == card) & (found["batch_count"] == batch)].set_index("variant")
            shown[f"{card}, batch {batch} (GiB reserved)"] = [_cell(rows.loc[v]) for v in shown["variant"]]
        shown[f"{card}, largest batch"] = [rows.loc[v, "largest_batch_count"] for v in shown["variant"]]
    room = "; ".join(f"{card} {gpus.find(card).free_bytes_at_start / GIB:.1f}" for card in CARDS)
    return Shown(shown, f"1.3B at 2,048 tokens. GiB free at start: {room}. Predicted, torch {RELEASE}, without a GPU.")


def _cell(row: pd.Series) -> str:
    size = row["peak_reserved_bytes"] / GIB
    return f"fits, {size:.1f}" if row["fits"] else f"no, out of memory in {row['fails_phase']}"


def main(words: list[str] | None = None) -> None:
    """Predict the verdicts and write their table."""
    parser("findings.worked_example", __doc__).parse_args(words)
    facts = results.provenance("predicted", gpu=", ".join(CARDS), torch=RELEASE, seed=0,
                               config={"model": "1.3B", "length": 2048, "precision": "bf16"})
    table = results.save_table(verdict_rows(), results.table_path("predicted", "08-verdicts", "80gb"), facts)
    print(f"08-verdicts: {len(table)} rows")


if __name__ == "__main__":
    main()
