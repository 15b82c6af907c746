"""Where each saving ends: the largest batch and the longest sequence, predicted beside what the card said to them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import pandas as pd

from gpt2.study.savings.compared import about, of, says, steps, table
from gpt2.study.savings.ladder import LADDER, LENGTH_STEP, SAVINGS, Saving, by_key
from gpt2.study.tables import MIB, Shown

_UNDER = "Sequences of 1,024 tokens under 45,440 MiB"
_PHASES = {"recompute": "backward, computing a block again"}


# --- the largest batch, and one more ----------------------------------------------------------------------------------


def largest(savings: Sequence[Saving] = LADDER) -> Shown:
    """The largest batch that was predicted, and what the card said to it and to one more."""
    ours, timed = of("07-savings", savings), steps()
    fits, more = (timed.reindex([s.at(s.largest + n) for s in savings]) for n in (0, 1))
    shown = pd.DataFrame({
        "configuration": says(savings),
        "largest batch, predicted": [s.largest for s in savings],
        "recorded": [_verdict(x) for x in fits["fits"]],
        "one more, predicted: fails in step": ours["next_fails_step"].to_numpy(),
        "one more, recorded: fails in step": more["failed_step"].to_numpy(),
    })
    for what in ("reserved", "allocated"):
        real = fits[f"peak_{what}_bytes"].to_numpy(dtype=float)
        shown[f"{what}, recorded (MiB)"] = real / MIB
        shown[f"recorded less predicted, {what} (bytes)"] = real - _last_timed(savings, what)
    shown["time per token (µs)"] = 1000 * (fits["step_ms"] / fits["tokens_count"]).to_numpy()
    return Shown(shown, f"{_UNDER}; peaks of the last step that was timed. {about()}")


def _last_timed(savings: Sequence[Saving], what: str) -> list[float]:
    """The predictions for the last step of each timed run at its largest batch: two steps ran before the timed ones."""
    counts = steps().reindex([s.at(s.largest) for s in savings])["timed_count"]
    return [math.nan if pd.isna(count) else row[f"largest_step_{int(count) + 2}_{what}_bytes"]
            for count, (_, row) in zip(counts, of("07-savings", savings).iterrows(), strict=True)]


def _verdict(fits) -> str:
    return "·" if pd.isna(fits) else "fits" if str(fits) == "True" else "out of memory"


def one_more(savings: Sequence[Saving] = LADDER) -> Shown:
    """How one sequence more than fits fails."""
    return _failing([(saving, saving.largest + 1, row)
                     for saving, (_, row) in zip(savings, of("07-savings", savings).iterrows(), strict=True)])


def beyond() -> Shown:
    """How batches fail that were once predicted to fit, and those beyond them."""
    return _failing(list(_beyond()))


def _beyond() -> Iterator[tuple[Saving, int, pd.Series]]:
    for _, row in table("predicted", "07-beyond").iterrows():
        yield by_key(row["key"]), row["batch_count"], row


def _failing(runs: Sequence[tuple[Saving, int, pd.Series]]) -> Shown:
    """Runs out of memory: in which step, asking for what, and the peaks of that step, predicted and recorded."""
    ours = pd.DataFrame([row for *_, row in runs])
    theirs = steps().reindex([saving.at(batch) for saving, batch, _ in runs])
    shown = pd.DataFrame({
        "configuration": [saving.says for saving, *_ in runs],
        "batch": [batch for _, batch, _ in runs],
        "fails in step, predicted": ours["next_fails_step"].to_numpy(),
        "recorded": theirs["failed_step"].to_numpy(),
        "asks for, predicted (GiB)": (ours["next_segment_bytes"] / 2**30).round(2).to_numpy(),
        "asks for, recorded (GiB)": [_asked(error) for error in theirs["error"]],
    })
    for what in ("allocated", "reserved"):
        real = theirs[f"peak_{what}_bytes"].to_numpy(dtype=float)
        shown[f"{what} in that step, recorded (MiB)"] = real / MIB
        shown[f"recorded less predicted, {what} (bytes)"] = real - ours[f"next_peak_{what}_bytes"].to_numpy(dtype=float)
    shown["fails in"] = ours["next_fails_phase"].replace(_PHASES).to_numpy()
    return Shown(shown, f"{_UNDER}; what is asked for, to the next 2 MiB. {about()}")


def _asked(error: str) -> float:
    """GiB that an out-of-memory message says were asked for."""
    found = re.search(r"allocate ([\d.]+) GiB", str(error))
    return float(found[1]) if found else math.nan


def confirmed() -> str:
    """How many boundaries were run, and how many of the runs did what was predicted: a paragraph of one."""
    savings = list({saving.at(saving.largest): saving for saving in SAVINGS}.values())  # two rows may be one run
    best, more = largest(savings).frame, one_more(savings).frame
    failed = pd.concat([more, beyond().frame]).drop_duplicates(["configuration", "batch"])
    inside = (best["recorded"] == "fits") & (more["fails in step, predicted"] == more["recorded"])
    in_step = failed["fails in step, predicted"] == failed["recorded"]
    *seen, last = sorted({int(step) for step in failed["recorded"].dropna()})
    return (
        f"Boundaries: {inside.sum()} of {len(savings)} are where they were predicted, the largest batch fits and one "
        f"more fails. Largest batches: {_exact(best)} of {len(best)} with the predicted peaks, allocated and reserved, "
        f"to the byte. Runs that failed: {in_step.sum()} of {len(failed)} in the predicted step "
        f"({', '.join(map(str, seen))} or {last}), {_exact(failed)} with the predicted peaks of that step."
    )


def _exact(table: pd.DataFrame) -> int:
    """Rows without a byte between recorded and predicted."""
    return int((table.filter(like="recorded less predicted") == 0).all(axis=1).sum())


def rungs() -> pd.DataFrame:
    """The ladder as `figures.ladder` wants it, with the time at each largest batch."""
    timed = steps().reindex([saving.at(saving.largest) for saving in LADDER])
    return pd.DataFrame({"configuration": says(LADDER), "largest_batch": [saving.largest for saving in LADDER],
                         "token_us": (1000 * timed["step_ms"] / timed["tokens_count"]).to_numpy()})


def together() -> str:
    """The ladder's two ends in a sentence."""
    (_, few, slow), *_, (_, many, fast) = rungs().itertuples(index=False)
    return (f"{few} sequences as published, {many} with every rung: {many / few:.1f} times the batch; {slow:.2f} µs a "
            f"token, then {fast:.2f}: {fast / slow:.2f} times the time")


# --- the longest sequence ---------------------------------------------------------------------------------------------


def longest() -> Shown:
    """The longest sequence of a batch of one, predicted and recorded."""
    ours, theirs = table("predicted", "07-lengths"), table("measured", "07-lengths").set_index("key")
    theirs = theirs.reindex(ours["key"])
    shown = pd.DataFrame({
        "configuration": ours["saving"],
        "longest, predicted (tokens)": ours["longest_count"],
        "recorded: fits": [_verdict(x) for x in theirs["longest_fits"]],
        f"recorded: {LENGTH_STEP} more": [_verdict(x) for x in theirs["next_fits"]],
        "allocated, recorded (MiB)": theirs["peak_allocated_bytes"].to_numpy() / MIB,
        "recorded less predicted, allocated (bytes)": (
            theirs["peak_allocated_bytes"].to_numpy() - ours["peak_allocated_bytes"].to_numpy()),
    })
    return Shown(shown, f"One sequence, the model's context as long, under 45,440 MiB. {about()}")
