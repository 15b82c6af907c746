"""Where each saving stops helping, what the loss alone costs, and what to do about which bucket: tables for readers."""

from __future__ import annotations

import pandas as pd

from gpt2.memory.trace import Category
from gpt2.study.savings import compared
from gpt2.study.savings.ladder import SINGLES, Saving
from gpt2.study.savings.predict import GPU, RELEASE
from gpt2.study.tables import MIB, Shown

_TAKES_FROM = {"bf16": Category.ACTIVATIONS, "sdpa": Category.ACTIVATIONS, "block": Category.ACTIVATIONS,
               "chunked": Category.LOSS, "drop-logits": Category.LOSS, "fused": Category.TEMPORARIES,
               "in-backward": Category.GRADIENTS, "moments": Category.OPTIMIZER}


def small_steps() -> pd.DataFrame:
    """Peaks of small steps, as `figures.crossovers` wants them."""
    found = compared.table("predicted", "07-crossovers")
    owners = [_TAKES_FROM[key].value if key in _TAKES_FROM else "" for key in found["key"]]
    return found[["saving", "tokens_count"]].assign(peak_bytes=found["peak_allocated_bytes"], category=owners)


def crossovers() -> Shown:
    """The baseline's peak over the tokens of a step, where it is, and how each saving changes it."""
    found = compared.table("predicted", "07-crossovers")
    wide = found.pivot(index="tokens_count", columns="key", values="peak_allocated_bytes")
    base = found[found["key"] == "base"].set_index("tokens_count")
    shown = pd.DataFrame({"tokens of a step": wide.index, "peak as published (MiB)": _whole(wide["base"])})
    shown["is in"] = base["peak_phase"].to_numpy()
    for key, name in found.drop_duplicates("key")[["key", "saving"]].iloc[1:].itertuples(index=False):
        shown[f"change, {name} (MiB)"] = _whole(wide[key] - wide["base"])
    return Shown(shown, f"Batches of sequences of 128 tokens. Predicted: {GPU}, torch {RELEASE}.")


def _whole(sizes: pd.Series) -> list[int]:
    return [round(size / MIB) for size in sizes]


def casts() -> Shown:
    """Autocast's copies of the weights, with its cache and without."""
    found = compared.table("predicted", "07-casts")
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
    found = compared.table("predicted", "07-selective")
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
    """Forward and backward of the loss from hidden states, plain, in chunks and liger-kernel's: time and peak."""
    found = compared.table("measured", "07-loss")
    facts = found.attrs
    found = found[found["vocabulary_count"] == vocabulary]
    shown = pd.DataFrame({"loss": found["loss"].unique()})
    for precision in ("fp32", "bf16"):
        rows = found[found["precision"] == precision].set_index("loss").reindex(shown["loss"])
        plain, logits = rows.loc["plain"], 4 * rows["rows_count"].iloc[0] * vocabulary
        shown[f"{precision} (ms)"] = rows["loss_ms"].to_numpy()
        shown[f"{precision}, time of the plain loss (ratio)"] = (rows["loss_ms"] / plain["loss_ms"]).to_numpy()
        shown[f"{precision}, peak (MiB)"] = rows["peak_bytes"].to_numpy() / MIB
        shown[f"{precision}, peak (fp32 logits)"] = (rows["peak_bytes"] / logits).to_numpy()
    shown["loss"] = shown["loss"].replace({"1 chunks": "1 chunk", "liger": f"liger-kernel {facts.get('liger_kernel')}"})
    sizes = found.iloc[0]
    what = f"{sizes['rows_count']:,} rows of width {sizes['width_count']:,}, vocabulary {vocabulary:,}"
    return Shown(shown, f"The loss alone: {what}. {compared.timed_on('07-loss')}")


def liger_step() -> Shown:
    """A whole step with liger-kernel's loss beside the plain one and ours in 8 chunks."""
    timed, rows = compared.steps(), []
    release = compared.table("measured", "07-loss").attrs.get("liger_kernel")
    for around, losses in (("as published", ("sweep-8", "chunked", "save-liger")),
                           ("rung 4", ("save-ladder-4", "save-ladder-5", "save-ladder-5-liger"))):
        for says, name in zip(("plain", "8 chunks", f"liger-kernel {release}"), losses, strict=True):
            row, plain = timed.loc[name], timed.loc[losses[0]]
            rows.append((around, says, row["step_ms"], row["least_ms"], row["most_ms"],
                         row["step_ms"] / plain["step_ms"], row["peak_allocated_bytes"] / MIB))
    heads = ["step", "loss", "step (ms)", "shortest step (ms)", "longest step (ms)", "time with the plain loss (ratio)",
             "allocated (MiB)"]
    return Shown(pd.DataFrame(rows, columns=heads), f"8 x 1,024 tokens. {compared.timed_on()}")


# --- what to do -------------------------------------------------------------------------------------------------------

_DECISIONS = (
    ("loss", "loss in chunks", "chunked", "up to 512 tokens a step; a small vocabulary"),
    ("loss", "del logits before backward", "drop-logits", "the loss is chunked: there are no logits to drop"),
    ("activations", "fused attention", "sdpa", "short sequences: the T x T part is small"),
    ("activations", "checkpoint every block", "block", "up to 512 tokens a step: the optimizer sets the peak"),
    ("activations", "checkpoint the attentions only", "attention", "attention is fused: no T x T is left"),
    ("activations", "bf16 autocast", "bf16", "up to 512 tokens a step; little while attention is written out"),
    ("activations, loss", "smaller micro-batches, any number of them", "accumulate", "at 1 sequence a micro-batch"),
    ("optimizer state", "bf16 moments", "moments", "never, but the second moment stops decaying: a risk"),
    ("gradients", "step in backward", "in-backward", "the loss sets the peak; no clipping, no accumulation"),
    ("temporaries", "fused AdamW", "fused", "the optimizer step is not the peak"),
    ("reserved, not allocated", "expandable segments", "expandable", "reserved memory is close to allocated"),
)


def decisions() -> Shown:
    """Which bucket dominates the peak, what to do, what it saves and costs on the baseline, and where it stops."""
    peaks, timed = compared.of("07-savings", SINGLES), compared.steps()
    savings = {s.key: s for s in SINGLES}
    base = savings["base"]
    rows = []
    for bucket, what, key, stops in _DECISIONS:
        saving = savings[key]
        saved = peaks.loc["base", "peak_allocated_bytes"] - peaks.loc[key, "peak_allocated_bytes"]
        slower = _per_token(timed, saving) / _per_token(timed, base) - 1
        rows.append((bucket, what, saved / MIB, saving.largest - base.largest, slower, stops))
    heads = ["dominates the peak", "what to do", "saves (MiB)", "change of the largest batch",
             "change of time per token (share)", "saves nothing when"]
    what = "Each alone on the baseline, 8 x 1,024 tokens, fp32"
    return Shown(pd.DataFrame(rows, columns=heads), f"{what}. {compared.about()}")


def _per_token(timed: pd.DataFrame, saving: Saving) -> float:
    row = timed.loc[saving.name]
    return row["step_ms"] / row["tokens_count"]
