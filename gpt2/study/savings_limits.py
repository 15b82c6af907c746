"""Where each saving stops helping, what the loss alone costs, and what to do about which bucket: tables for readers."""

from __future__ import annotations

import pandas as pd

from gpt2.memory.trace import Category
from gpt2.study import savings_tables
from gpt2.study.palette import number
from gpt2.study.savings_ladder import SINGLES, Saving
from gpt2.study.savings_predict import GPU, RELEASE
from gpt2.study.tables import MIB, Shown

_TAKES_FROM = {"bf16": Category.ACTIVATIONS, "sdpa": Category.ACTIVATIONS, "block": Category.ACTIVATIONS,
               "chunked": Category.LOSS, "drop-logits": Category.LOSS, "fused": Category.TEMPORARIES,
               "in-backward": Category.GRADIENTS, "moments": Category.OPTIMIZER}


def small_steps() -> pd.DataFrame:
    """Peaks of small steps, as `figures.crossovers` wants them."""
    found = savings_tables.table("predicted", "07-crossovers")
    owners = [_TAKES_FROM[key].value if key in _TAKES_FROM else "" for key in found["key"]]
    return found[["saving", "tokens_count"]].assign(peak_bytes=found["peak_allocated_bytes"], category=owners)


def crossovers() -> Shown:
    """Change of the peak against the baseline, MiB, a column per number of tokens; whose moment the peak is."""
    found = savings_tables.table("predicted", "07-crossovers")
    wide = found.pivot(index="key", columns="tokens_count", values="peak_allocated_bytes").loc[found["key"].unique()]
    change = (wide - wide.loc["base"]) / MIB
    names = found.drop_duplicates("key").set_index("key")["saving"]
    shown = pd.DataFrame({"saving": [names[key] for key in wide.index]})
    for tokens in wide:
        shown[f"{tokens:,} tokens (MiB)"] = [_signed(x) for x in change[tokens]]
    shown.iloc[0, 1:] = [f"{size / MIB:,.0f}" for size in wide.loc["base"]]
    base = found[found["key"] == "base"].set_index("tokens_count")
    shown.loc[len(shown)] = ["the baseline's peak is in", *base["peak_phase"]]
    what = "Batches of sequences of 128 tokens: first row the peak, then its change"
    return Shown(shown, f"{what}. Predicted: {GPU}, torch {RELEASE}.")


def _signed(mib: float) -> str:
    return number(mib, 0, sign=True)


def casts() -> Shown:
    """Autocast's copies of the weights, with its cache and without."""
    found = savings_tables.table("predicted", "07-casts")
    shown = pd.DataFrame({
        "configuration": found["configuration"],
        "cache": ["on" if on else "off" for on in found["cache"]],
        "casts made in a step": found["made_count"],
        "alive at most (MiB)": found["most_casts_bytes"] / MIB,
        "alive at the end of forward (MiB)": found["forward_end_casts_bytes"] / MIB,
        "alive at the peak (MiB)": found["peak_casts_bytes"] / MIB,
        "peak (MiB)": found["peak_allocated_bytes"] / MIB,
    })
    return Shown(shown, f"16-bit copies of fp32 weights, 8 x 1,024 tokens. Predicted: {GPU}, torch {RELEASE}.")


def selective() -> Shown:
    """Checkpointing the attention alone, where it is written out and where it is fused."""
    found = savings_tables.table("predicted", "07-selective")
    shown = pd.DataFrame({
        "attention": found["attention"],
        "precision": found["precision"],
        "peak (MiB)": found["kept_peak_bytes"] / MIB,
        "of it T x T (MiB)": found["kept_square_bytes"] / MIB,
        "attention checkpointed: peak (MiB)": found["checkpointed_peak_bytes"] / MIB,
        "saved (MiB)": (found["kept_peak_bytes"] - found["checkpointed_peak_bytes"]) / MIB,
        "saved of T x T (MiB)": (found["kept_square_bytes"] - found["checkpointed_square_bytes"]) / MIB,
    })
    return Shown(shown, f"8 x 1,024 tokens. Predicted: {GPU}, torch {RELEASE}.")


# --- the loss alone ---------------------------------------------------------------------------------------------------


def loss_alone(vocabulary: int = 50_257) -> Shown:
    """Forward and backward of the loss from hidden states, plain and in chunks: time, peak in units of the logits."""
    found = savings_tables.table("measured", "07-loss")
    found = found[found["vocabulary_count"] == vocabulary]
    shown = pd.DataFrame({"loss": found["loss"].unique()})
    for precision in ("fp32", "bf16"):
        rows = found[found["precision"] == precision].set_index("loss").reindex(shown["loss"])
        plain, logits = rows.loc["plain"], 4 * rows["rows_count"].iloc[0] * vocabulary
        shown[f"{precision} (ms)"] = rows["loss_ms"].to_numpy()
        shown[f"{precision}, time of the plain loss (ratio)"] = (rows["loss_ms"] / plain["loss_ms"]).to_numpy()
        shown[f"{precision}, peak (fp32 logits)"] = (rows["peak_bytes"] / logits).to_numpy()
    sizes = found.iloc[0]
    what = f"{sizes['rows_count']:,} rows of width {sizes['width_count']:,}, vocabulary {vocabulary:,}"
    return Shown(shown, f"The loss alone: {what}. {savings_tables.timed_on()}")


# --- what to do -------------------------------------------------------------------------------------------------------

_DECISIONS = (
    ("loss", "loss in chunks", "chunked", "fewer than 512 tokens a step; a small vocabulary"),
    ("loss", "del logits before backward", "drop-logits", "the loss is chunked: there are no logits to drop"),
    ("activations", "fused attention", "sdpa", "short sequences: the T x T part is small"),
    ("activations", "checkpoint every block", "block", "the optimizer or the loss sets the peak"),
    ("activations", "checkpoint the attentions only", "attention", "attention is fused: no T x T is left"),
    ("activations", "bf16 autocast", "bf16", "fewer than 1,024 tokens a step; little while attention is written out"),
    ("activations, loss", "smaller micro-batches, accumulated", "accumulate", "at 1 sequence a micro-batch"),
    ("optimizer state", "bf16 moments", "moments", "never, but the second moment stops decaying: a risk"),
    ("gradients", "step in backward", "in-backward", "the loss sets the peak; no clipping, no accumulation"),
    ("temporaries", "fused AdamW", "fused", "the optimizer step is not the peak"),
    ("reserved, not allocated", "expandable segments", "expandable", "one segment per request is no problem"),
)


def decisions() -> Shown:
    """Which bucket dominates the peak, what to do, what it saves and costs on the baseline, and where it stops."""
    peaks, timed = savings_tables.of("07-savings", SINGLES), savings_tables.steps()
    savings = {s.key: s for s in SINGLES}
    base = savings["base"]
    rows = []
    for bucket, what, key, stops in _DECISIONS:
        saving = savings[key]
        saved = peaks.loc["base", "peak_allocated_bytes"] - peaks.loc[key, "peak_allocated_bytes"]
        slower = _per_token(timed, saving) / _per_token(timed, base) - 1
        rows.append((bucket, what, saved / MIB, saving.largest - base.largest, slower, stops))
    heads = ["dominates the peak", "what to do", "saves (MiB)", "largest batch (change)", "time per token (share)",
             "saves nothing when"]
    shown = pd.DataFrame(rows, columns=heads)
    shown["time per token (share)"] = [f"{number(100 * x, 0, sign=True)} %" for x in shown["time per token (share)"]]
    return Shown(shown, f"Each alone on the baseline, 8 x 1,024 tokens, fp32. {savings_tables.about()}")


def _per_token(timed: pd.DataFrame, saving: Saving) -> float:
    row = timed.loc[saving.name]
    return row["step_ms"] / row["tokens_count"]
