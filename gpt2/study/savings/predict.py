"""Every prediction of notebook 07, made once: `python -m gpt2.study.savings.predict [--jobs 2]`.

A hundred and more simulated runs take minutes, and a notebook has seconds: it reads these tables, predicts a few rows
again, and says so if they differ. Tables go to results/predicted/h200/ (07-savings, 07-beyond, 07-lengths,
07-crossovers, 07-selective, 07-casts) and, of the published card, a40/ (07-waterfall).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context

import pandas as pd
import torch

from gpt2.memory.fit import STEPS
from gpt2.memory.ledger import Ledger
from gpt2.memory.trace import Category, Trace
from gpt2.step import Recipe
from gpt2.study import results
from gpt2.study.experiments import EXPERIMENTS, Experiment, predict
from gpt2.study.savings.ladder import BEYOND, LADDER, LENGTH_STEP, LENGTHS, LIMIT_MIB, SAVINGS, by_key

GPU, RELEASE = "H200", "2.11.0"  # card and PyTorch of the recordings
ARTICLE = ("A40", "2.5.1")  # those of the published baseline
SHORT = 128  # tokens: sequences so short that a batch of them is a small step
SHORT_BATCHES = (1, 2, 4, 8, 16, 32, 64)
COMPARED = ("base", "bf16", "sdpa", "chunked", "block", "drop-logits", "fused", "in-backward", "moments")
CASTS = {
    "bf16": {"precision": "bf16"},
    "bf16, every block checkpointed": {"precision": "bf16", "checkpoint": "block"},
    "bf16, loss in 8 chunks": {"precision": "bf16", "loss": "chunked"},
}


# --- a trace as a row -------------------------------------------------------------------------------------------------


def at_peak(trace: Trace) -> dict:
    """Peaks of the later steps, who asked for the peak, whose the bytes are: a row, a column per owner."""
    later = {mark.step for mark in trace.marks if mark.step > 1} or None
    ledger = Ledger(trace)
    peak = ledger.peak_owner(later)
    owners = ledger.at(peak.index).set_index("category")["allocated_bytes"]
    reserved = max((m.max_reserved_bytes for m in trace.marks if later is None or m.step in later), default=0)
    return {
        "peak_allocated_bytes": peak.allocated_bytes,
        "peak_reserved_bytes": reserved,
        "peak_phase": peak.phase,
        "peak_module": peak.module,
        "peak_operator": peak.operator,
        "peak_owner": peak.category,
        **{f"{name.replace(' ', '_')}_bytes": int(size) for name, size in owners.items()},
    }


def failure(trace: Trace) -> dict:
    """Where a run ended that did not fit."""
    found = trace.meta["out_of_memory"]
    if found is None:
        return {"next_fits": True}
    return {
        "next_fits": False,
        "next_fails_step": found["step"],
        "next_fails_phase": found["phase"],
        "next_fails_operator": found["operator"],
        "next_request_bytes": found["requested_bytes"],
    }


def failing_step(trace: Trace) -> dict:
    """What the card had in the step that failed, as its counters say afterwards, and what was asked of the driver."""
    found = trace.meta["out_of_memory"]
    if found is None:
        return {}
    inside = [i for i, event in enumerate(trace.events) if event.step == found["step"]]
    counted = slice(max(inside[0] - 1, 0), inside[-1] + 1)  # a step begins with what the one before has left
    return {
        "next_segment_bytes": found["segment_bytes"],
        "next_peak_allocated_bytes": max(trace.allocated_bytes()[counted]),
        "next_peak_reserved_bytes": max(trace.reserved_bytes()[counted]),
    }


# --- one row of each table, in a process of its own ------------------------------------------------------------------


def _predict(experiment: Experiment) -> Trace:
    return predict(experiment, GPU, torch_release=RELEASE)


def saving_row(key: str) -> dict:
    """A saving with 8 sequences, at its largest batch, and with one more."""
    saving = by_key(key)
    row = {"key": key, "saving": saving.says, "batch_count": saving.batch} | at_peak(_predict(EXPERIMENTS[saving.name]))
    fits, fails = (_predict(replace(EXPERIMENTS[saving.at(saving.largest + n)], steps=STEPS)) for n in (0, 1))
    return row | at_largest(saving.largest, fits) | failure(fails) | failing_step(fails)


def at_largest(batch: int, trace: Trace) -> dict:
    """The run at the largest batch; what its 4th, 5th and 6th step reserved, to be compared with a timed run's last."""
    top = at_peak(trace)
    row = {"largest_batch_count": batch, "largest_fits": trace.meta["out_of_memory"] is None}
    row |= {f"largest_{name}": top[name] for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_phase")}
    for step in (4, 5, 6):
        marks = [mark for mark in trace.marks if mark.step == step]
        for what in ("allocated", "reserved"):
            row[f"largest_step_{step}_{what}_bytes"] = max(
                (getattr(mark, f"max_{what}_bytes") for mark in marks), default=None)
    return row


def beyond_row(key: str, batch: int) -> dict:
    """A batch beyond the boundary: in which step it fails."""
    saving = by_key(key)
    settings = {"limit_mib": LIMIT_MIB, "alloc_conf": saving.alloc_conf, "backend": saving.backend}
    trace = _predict(Experiment("", saving.recipe(batch), steps=STEPS, **settings))
    return {"key": key, "saving": saving.says, "batch_count": batch} | failure(trace) | failing_step(trace)


def waterfall_row(key: str) -> dict:
    """A rung with 8 sequences on the published card."""
    saving, (gpu, release) = by_key(key), ARTICLE
    trace = predict(EXPERIMENTS[saving.name], gpu, torch_release=release)
    return {"key": key, "saving": saving.says} | at_peak(trace)


def length_row(key: str) -> dict:
    """The longest sequence, and one 256 tokens longer."""
    length = LENGTHS[key]
    fits, fails = (_predict(EXPERIMENTS[f"save-{key}-length-{n}"]) for n in (length, length + LENGTH_STEP))
    row = {"key": key, "saving": by_key(key).says, "batch_count": 1, "longest_count": length}
    return row | {"longest_fits": fits.meta["out_of_memory"] is None} | at_peak(fits) | failure(fails)


def crossover_row(key: str, batch: int) -> dict:
    """A saving in a small step."""
    saving = by_key(key)
    recipe = replace(saving.recipe(batch), length=SHORT)
    trace = _predict(Experiment("", recipe, alloc_conf=saving.alloc_conf))
    row = {"key": key, "saving": saving.says, "batch_count": batch, "length_count": SHORT}
    return row | {"tokens_count": batch * SHORT} | at_peak(trace)


def casts_row(name: str, cached: bool) -> dict:
    """The weights that autocast has cast, alive at the peak and at the end of forward, with its cache or without."""
    with _cast_cache(cached):
        trace = _predict(Experiment("", Recipe(**CASTS[name])))
    end = next(m for m in trace.marks if (m.name, m.step) == ("forward", 2)).event_count - 1
    row = {"configuration": name, "cache": cached, "peak_allocated_bytes": at_peak(trace)["peak_allocated_bytes"]}
    for moment, index in (("peak", trace.peak({2})), ("forward_end", end)):
        found = cast_weights(trace, index)
        row |= {f"{moment}_casts_count": len(found), f"{moment}_casts_bytes": sum(b.event.block_bytes for b in found)}
    made = [b for b in _casts(trace) if b.event.step == 2]
    return row | {"made_count": len(made), "most_casts_bytes": _most(made)}


def selective_row(attention: str, precision: str) -> dict:
    """The attentions alone checkpointed or not; and how much of the peak is tensors of length x length."""
    row: dict = {"attention": attention, "precision": precision}
    for name, choice in (("kept", "none"), ("checkpointed", "attention")):
        trace = _predict(Experiment("", Recipe(attention=attention, precision=precision, checkpoint=choice)))
        square = trace.meta["recipe"]["length"] ** 2
        alive = trace.live_at(trace.peak({2, 3}))
        row[f"{name}_peak_bytes"] = at_peak(trace)["peak_allocated_bytes"]
        row[f"{name}_square_bytes"] = sum(b.event.block_bytes for b in alive if _is_square(b.event.shape, square))
    return row


def _is_square(shape: tuple[int, ...], square: int) -> bool:
    return len(shape) > 1 and shape[-1] * shape[-2] == square and shape[-1] == shape[-2]


@contextmanager
def _cast_cache(enabled: bool):
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _casts(trace: Trace) -> list:
    """Blocks that are 16-bit copies of parameters."""
    shapes = {e.shape for e in trace.events if e.category == Category.PARAMETERS.value and e.shape}
    return [
        b
        for b in trace.blocks()
        if b.event.dtype in ("bfloat16", "float16") and b.event.operator == "aten._to_copy" and b.event.shape in shapes
        and b.event.phase in ("forward", "recompute")
    ]


def cast_weights(trace: Trace, index: int) -> list:
    """The 16-bit copies of parameters alive after event `index`: the bucket of autocast's casts."""
    return [b for b in _casts(trace) if b.born <= index and (b.died is None or b.died > index)]


def _most(blocks: list) -> int:
    """The most bytes of these blocks that are alive at a time."""
    changes = [(b.born, b.event.block_bytes) for b in blocks]
    changes += [(b.died, -b.event.block_bytes) for b in blocks if b.died is not None]
    alive = most = 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


# --- all of them ------------------------------------------------------------------------------------------------------

TABLES: dict[str, tuple[Callable[..., dict], list[tuple]]] = {
    "07-savings": (saving_row, [(s.key,) for s in SAVINGS]),
    "07-beyond": (beyond_row, [(key, batch) for key, batches in BEYOND.items() for batch in batches]),
    "07-waterfall": (waterfall_row, [(s.key,) for s in LADDER]),
    "07-lengths": (length_row, [(key,) for key in LENGTHS]),
    "07-crossovers": (crossover_row, [(key, batch) for key in COMPARED for batch in SHORT_BATCHES]),
    "07-selective": (selective_row, [(a, p) for a in ("explicit", "sdpa") for p in ("fp32", "bf16")]),
    "07-casts": (casts_row, [(name, cached) for name in CASTS for cached in (True, False)]),
}


def config(name: str) -> dict:
    """What the header of a table says of its runs."""
    own = {"07-crossovers": {"length": SHORT}, "07-lengths": {"batch": 1, "length": "the context"}}
    return {"model": "124M", "length": 1024, "limit_mib": LIMIT_MIB, **own.get(name, {})}


def save(name: str, rows: Iterable[dict]) -> pd.DataFrame:
    """Write a table of predictions."""
    gpu, release = ARTICLE if name == "07-waterfall" else (GPU, RELEASE)
    facts = results.provenance("predicted", gpu=gpu, torch=release, config=config(name), seed=0)
    return results.save_table(pd.DataFrame(list(rows)), results.table_path("predicted", name, gpu.lower()), facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("tables", nargs="*", default=list(TABLES), metavar="TABLE")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for name in arguments.tables:
            row, wanted = TABLES[name]
            table = save(name, pool.map(row, *zip(*wanted, strict=True)))
            print(f"{name}: {len(table)} rows", flush=True)


if __name__ == "__main__":
    main()
