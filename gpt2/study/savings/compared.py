"""What each saving does, as tables for readers: predicted beside recorded, and what it costs in time.

The tables behind them: results/predicted/h200/07-*.csv from `predict`, results/measured/h200/07-*.csv from
`recorded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pandas as pd

from gpt2.memory.answer import answer
from gpt2.memory.trace import Category
from gpt2.study import paths, results, runs
from gpt2.study.experiments import EXPERIMENTS, Experiment, predict
from gpt2.study.savings.ladder import BACKENDS, LADDER, SINGLES, Saving, by_key
from gpt2.study.savings.predict import GPU, RELEASE, at_peak
from gpt2.study.tables import MIB, Shown

ALL = (*SINGLES, *BACKENDS, *LADDER[1:])
OWNERS = [c for c in Category if c is not Category.OUTSIDE]
_MOMENTS = {
    "aten._log_softmax_backward_data": "loss: backward of log-softmax",
    "aten.nll_loss_backward": "loss: backward of the negative log-likelihood",
    "aten._log_softmax": "loss: log-softmax",
    "aten._to_copy": "a cast between 16 and 32 bits",
    "softmax backward: grad * output": "backward of the attention's softmax",
}


@cache
def table(kind: str, name: str) -> pd.DataFrame:
    """One of the study's tables; predictions that another folder does not have are those of the checkout."""
    path = f"{kind}/{runs.HOME}/{name}.csv"
    try:
        return results.load_table(path)
    except FileNotFoundError:
        return results.load_table(paths.ROOT / "results" / path)


def of(name: str, savings: Sequence[Saving], kind: str = "predicted") -> pd.DataFrame:
    """The rows of these savings, in their order; missing ones are empty."""
    return table(kind, name).set_index("key").reindex([saving.key for saving in savings])


def about() -> str:
    """Where the columns come from, for a caption."""
    facts = table("measured", "07-savings").attrs
    return (
        f"Predicted: {GPU}, torch {RELEASE}, without a GPU. Recorded: {facts['gpu']}, torch {facts['torch']}, driver "
        f"{facts['driver']}, {str(facts['date'])[:10]}."
    )


def says(savings: Sequence[Saving]) -> list[str]:
    """What each is, for a column."""
    return [saving.says for saving in savings]


# --- memory -----------------------------------------------------------------------------------------------------------


def peaks(savings: Sequence[Saving] = SINGLES) -> Shown:
    """Peak allocated and reserved with 8 sequences, predicted and recorded, and what is saved against the first row."""
    ours, theirs = of("07-savings", savings), of("07-savings", savings, "measured")
    shown = pd.DataFrame({"saving": says(savings)})
    for what in ("allocated", "reserved"):
        column = f"peak_{what}_bytes"
        mine, real = ours[column].to_numpy(), theirs[column].to_numpy(dtype=float)
        shown[f"{what}, predicted (MiB)"] = mine / MIB
        shown[f"{what}, recorded (MiB)"] = real / MIB
        shown[f"recorded less predicted, {what} (bytes)"] = real - mine
    first = ours["peak_allocated_bytes"].iloc[0]
    shown.insert(1, "change of the peak (MiB)", (ours["peak_allocated_bytes"].to_numpy() - first) / MIB)
    return Shown(shown, f"Peak of a step of 8 x 1,024 tokens. {about()}")


def new_peaks(savings: Sequence[Saving] = SINGLES) -> Shown:
    """Which request sets the peak now, and who owns the most at that moment."""
    rows = []
    for saving, (_, row) in zip(savings, of("07-savings", savings).iterrows(), strict=True):
        owned = {c.value: row[_column(c)] for c in OWNERS}
        largest = sorted(owned, key=owned.get, reverse=True)[:2]
        total = row["peak_allocated_bytes"]
        shares = ", ".join(f"{name} {owned[name] / total:.0%}" for name in largest)
        rows.append((saving.says, _phase(row), _moment(row), row["peak_module"], shares))
    heads = ["saving", "phase", "the request that sets the peak", "module", "largest owners at the peak"]
    return Shown(pd.DataFrame(rows, columns=heads), f"Where the peak is now. Predicted: {GPU}, torch {RELEASE}.")


def _column(category: Category) -> str:
    return f"{category.value.replace(' ', '_')}_bytes"


def _phase(row: pd.Series) -> str:
    return "forward, inside the chunked loss" if row["peak_phase"] == "recompute" and row["peak_owner"] == "loss" \
        else row["peak_phase"]


def _moment(row: pd.Series) -> str:
    operator = row["peak_operator"]
    return _MOMENTS.get(operator, operator.removeprefix("aten."))


# --- the waterfall ----------------------------------------------------------------------------------------------------


def waterfall(name: str = "07-waterfall", gpu: str = "a40") -> pd.DataFrame:
    """The ladder's peaks with 8 sequences, as `figures.waterfall` wants them: a drop and the owner that fell most."""
    path = f"predicted/{gpu}/{name}.csv"
    try:
        found = results.load_table(path)
    except FileNotFoundError:
        found = results.load_table(paths.ROOT / "results" / path)
    columns = [_column(c) for c in OWNERS]
    fallen = -found[columns].diff().fillna(0)
    owners = [OWNERS[columns.index(c)].value for c in fallen.idxmax(axis=1)]
    return pd.DataFrame({"saving": found["saving"], "peak_bytes": found["peak_allocated_bytes"],
                         "category": ["", *owners[1:]]})


# --- time -------------------------------------------------------------------------------------------------------------


def steps() -> pd.DataFrame:
    """Every timed run, by the name of its experiment."""
    return table("measured", "07-steps").set_index("experiment")


def times(savings: Sequence[Saving] = SINGLES) -> Shown:
    """Step time of 8 sequences, its range over the timed steps, tokens per second, and time against the first row."""
    timed = steps().reindex([saving.name for saving in savings])
    shown = pd.DataFrame({"saving": says(savings), "step (ms)": timed["step_ms"].to_numpy()})
    for column, head in (("least_ms", "shortest step (ms)"), ("most_ms", "longest step (ms)")):
        shown[head] = timed[column].to_numpy()
    for phase in ("forward", "backward", "optimizer"):
        shown[f"{phase} (ms)"] = timed[f"{phase}_ms"].to_numpy()
    shown["tokens per second"] = 1000 * (timed["tokens_count"] / timed["step_ms"]).to_numpy()
    shown["time against the first row (ratio)"] = (timed["step_ms"] / timed["step_ms"].iloc[0]).to_numpy()
    shown = shown.round({"tokens per second": -2})
    return Shown(shown, f"Medians of CUDA-event times of ten steps, 8 x 1,024 tokens. {timed_on()}")


def timed_on(name: str = "07-steps") -> str:
    """Where and when the times of a table were taken."""
    facts = table("measured", name).attrs
    return f"Recorded: {facts['gpu']}, torch {facts['torch']}, driver {facts['driver']}, {str(facts['date'])[:10]}."


def frontier() -> pd.DataFrame:
    """Peak and step time of 8 sequences, each alone and each rung, as `figures.frontier` wants them.

    Two of the implementations of fused attention are left out: they lie on cuDNN's point.
    """
    rungs = {saving.key: f"rung {n}, {saving.says}" for n, saving in enumerate(LADDER) if n > 2}
    savings = [saving for saving in ALL if saving.key in rungs or saving not in LADDER[1:]]
    savings = [saving for saving in savings if saving.key not in ("flash", "efficient")]
    names = [rungs.get(saving.key, saving.says) for saving in savings]
    timed = steps().reindex([saving.name for saving in savings])
    peaks = of("07-savings", savings, "measured")["peak_allocated_bytes"].to_numpy()
    times = {column: timed[column].to_numpy() for column in ("step_ms", "least_ms")}
    return pd.DataFrame({"configuration": names, "peak_bytes": peaks, **times}).dropna()


def extra_forward() -> Shown:
    """Where a checkpoint's second forward shows: time of each phase against the baseline's."""
    chosen = [s for s in SINGLES if s.key in ("base", "mlp", "attention", "every-2", "block")]
    timed = steps().reindex([saving.name for saving in chosen])
    base = timed.iloc[0]
    shown = pd.DataFrame({"configuration": says(chosen)})
    for phase in ("forward", "backward", "step"):
        shown[f"{phase} (ms)"] = timed[f"{phase}_ms"].to_numpy()
    extra = timed["backward_ms"].to_numpy() - base["backward_ms"]
    shown["more backward, of one forward (share)"] = extra / base["forward_ms"]
    shown["more step (share)"] = timed["step_ms"].to_numpy() / base["step_ms"] - 1
    return Shown(shown, f"What computing a forward again costs, 8 x 1,024 tokens, fp32. {timed_on()}")


# --- today's check of yesterday's tables ------------------------------------------------------------------------------


def predicted_again(savings: Sequence[Saving]) -> str:
    """Predict these rows now and compare them with the table: a sentence, or ValueError if any byte differs."""
    rows = of("07-savings", savings)
    for saving in savings:
        now = at_peak(predict(EXPERIMENTS[saving.name], GPU, torch_release=RELEASE))
        kept = rows.loc[saving.key]
        for column in ("peak_allocated_bytes", "peak_reserved_bytes"):
            if now[column] != kept[column]:
                raise ValueError(f"{saving.says}: {column} is {now[column]:,} now and {kept[column]:,} in the table; "
                                 "run python -m gpt2.study.savings.predict")
    names = ", ".join(saving.says for saving in savings)
    return f"Predicted again just now and equal to the tables, to the byte: {names}."


def yours(saving: str, batch: int, gpu: str, torch_release: str) -> str:
    """A saving of the tables with another batch, on another card: a sentence."""
    chosen = by_key(saving)
    trace = predict(Experiment("", chosen.recipe(batch), alloc_conf=chosen.alloc_conf, backend=chosen.backend), gpu,
                    torch_release=torch_release)
    found = answer(trace, owners=False)
    verdict = "fits" if found["fits"] else f"is out of memory in {found['out_of_memory']['phase']}"
    return (f"{chosen.says}, batch {batch} x 1,024, predicted for {gpu}: {verdict}, allocated "
            f"{found['peak_allocated_bytes'] / MIB:,.1f} MiB, reserved {found['peak_reserved_bytes'] / MIB:,.1f} MiB")
