"""Tables as readers see them: every kind of number in its own column, its unit in the head, its source in the caption.

A *row function* turns one trace into a tidy table; `beside` sets the tables of several traces side by side, and `save`
keeps each as a file of its own kind.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import pandas as pd

from gpt2.memory.ledger import Ledger
from gpt2.memory.trace import Trace
from gpt2.study import results
from gpt2.study.runs import Beside, release, slug, source

MIB = 2**20
Rows = Callable[[Trace], pd.DataFrame]
_CSS = "text-align: left; caption-side: top; color: #555555; padding-bottom: 4px"


class Shown:
    """A table with a caption, as a notebook shows it; `frame` is the table itself, unformatted."""

    def __init__(self, frame: pd.DataFrame, caption: str):
        self.frame, self.caption = frame, caption

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        cells = pd.DataFrame({name: [_cell(name, value) for value in self.frame[name]] for name in self.frame})
        words = [name for name in cells if self.frame[name].map(lambda value: isinstance(value, str)).any()]
        sides = {name: "left" if name in words else "right" for name in cells}
        head = "".join(f'<th style="text-align: {sides[name]}">{html.escape(name)}</th>' for name in cells)
        rows = "".join(
            "<tr>"
            + "".join(f'<td style="text-align: {sides[name]}">{html.escape(row[name])}</td>' for name in cells)
            + "</tr>\n"
            for _, row in cells.iterrows()
        )
        caption = f'<caption style="{_CSS}">{html.escape(self.caption)}</caption>'
        table = f"<table>{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>"
        return {"text/html": table, "text/plain": f"{self.caption}\n{cells.to_string(index=False)}"}


def published(name: str) -> pd.DataFrame:
    """A published table, such as `01-line-by-line`; its source is in `.attrs`."""
    return results.load_table(f"published/{name}.csv")


@lru_cache
def number(name: str) -> float:
    """A number of the first article, by its name in results/published/00-numbers.csv."""
    rows = published("00-numbers").set_index("number")
    return float(rows.loc[name, "value"])


def is_published(trace: Trace) -> bool:
    """Whether a trace is of the configuration that the first article measured."""
    from gpt2.step import Recipe

    return trace.meta.get("recipe") == Recipe().__dict__


def beside(
    runs: Beside, rows: Rows, key: Sequence[str], value: str, *, article: Mapping | None = None, unit: str = "MiB"
) -> pd.DataFrame:
    """`value` of each trace's rows in a column per trace, with what is published first and the differences.

    Args:
        key: the columns that name a row; the rows of the first trace give their order.
        article: published values in `unit` by the first key column; left out where the run is of another configuration.
        unit: "MiB" turns bytes into MiB; anything else is shown as it is.

    The difference to a published number is in its unit; that between a recording and its prediction in bytes.
    """
    tables = [rows(trace).drop_duplicates(list(key)).set_index(list(key))[value] for trace in runs.traces()]
    scale = MIB if unit == "MiB" else 1
    out = tables[0].reset_index()[list(key)]
    index = pd.MultiIndex.from_frame(out) if len(key) > 1 else pd.Index(out[key[0]])
    columns = [table.reindex(index).to_numpy() for table in tables]
    heads = [f"{source(trace)} ({unit})" for trace in runs.traces()]
    if article and is_published(runs.predicted):
        out[f"published A40 ({unit})"] = [article.get(name) for name in out[key[0]]]
        out[heads[0]] = columns[0] / scale
        out[f"off ({unit})"] = out[heads[0]] - pd.to_numeric(out[f"published A40 ({unit})"])
    else:
        out[heads[0]] = columns[0] / scale
    for head, column in list(zip(heads, columns, strict=True))[1:]:
        if head not in out:
            out[head] = column / scale
    if runs.twin is not None:
        out["recorded less predicted (bytes)" if scale == MIB else "recorded less predicted"] = (
            columns[1] - columns[-1]
        )
    return out


def caption(what: str, runs: Beside, article: bool = False) -> str:
    """What a table shows, and where its columns come from."""
    words = [what.rstrip(".") + "."]
    if article and is_published(runs.predicted):
        words.append("Published: A40, torch 2.5.1.")
    p = runs.predicted.meta
    words.append(f"Predicted: {slug(p['gpu']).upper()}, torch {release(runs.predicted)}, without a GPU.")
    if runs.recorded is not None:
        r = runs.recorded.meta
        words.append(
            f"Recorded: {r['gpu']}, torch {r['torch']}, driver {r.get('driver', 'unknown')}, "
            f"{r.get('date', 'date unknown')}."
        )
    return " ".join(words)


def timeline(trace: Trace, step: int = 2) -> pd.DataFrame:
    """Bytes of each owner after each event of a step, for the figures."""
    return Ledger(trace).timeline([step])


def save(name: str, runs: Beside | Trace, rows: Rows) -> None:
    """Keep what was predicted as results/predicted/<gpu>/<name>.csv; recordings are kept by `measured`."""
    for trace in runs.traces() if isinstance(runs, Beside) else [runs]:
        if trace.meta["kind"] == "predicted":
            keep(name, trace, rows(trace))


def keep(name: str, trace: Trace, table: pd.DataFrame) -> pd.DataFrame:
    """Write one trace's table, with the trace's provenance, under results/<kind>/<gpu>/."""
    return results.save_table(
        table, results.table_path(trace.meta["kind"], name, slug(trace.meta["gpu"])), provenance(trace)
    )


def provenance(trace: Trace, **config) -> dict:
    """Where a table made of this trace comes from; a recording brings its own date, driver and free memory."""
    meta = trace.meta
    config = config or {
        key: meta[key] for key in ("experiment", "steps", "recipe", "limit_bytes", "allocator_conf") if meta.get(key)
    }
    facts = results.provenance(meta["kind"], gpu=meta["gpu"], torch=meta["torch"], config=config, seed=0)
    if meta["kind"] == "measured":
        facts |= {
            "date": meta.get("date"),
            "cuda": meta.get("cuda"),
            "driver": meta.get("driver"),
            "free_bytes": meta.get("capacity_bytes"),
            "command": "python -m gpt2.study.measure",
            "commit": meta.get("commit"),
            "dirty": meta.get("dirty"),
        }
    return {key: value for key, value in facts.items() if value is not None}


def guessed(guess: float, found: float, unit: str = "MiB") -> str:
    """How far a guess was off, in a sentence."""
    if guess <= 0:
        return f"no guess; found {found:,.0f} {unit}"
    ratio = found / guess
    far = (
        "right within 5 %"
        if 0.95 <= ratio <= 1.05
        else f"{ratio:,.1f} times too low"
        if ratio > 1
        else f"{1 / ratio:,.1f} times too high"
    )
    return f"guessed {guess:,.0f} {unit}, found {found:,.0f} {unit}: {far}"


def _cell(head: str, value) -> str:
    """A value as text: bytes and counts whole, MiB with two digits, published numbers as published."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, float) and value != value:
        return "·"
    if not isinstance(value, int | float):
        return str(value)
    if head.startswith("published"):
        return f"{value:,.10g}"
    whole = (
        isinstance(value, int) or value == int(value) and not any(word in head for word in ("MiB", "share", "nats"))
    )
    sign = "+" if value and head.startswith(("off", "change", "difference", "recorded less")) else ""
    if "(share)" in head:
        return f"{value:{sign}.1%}"
    return f"{value:{sign},.0f}" if whole else f"{value:{sign},.2f}".replace("-0.00", "0.00").replace("+0.00", "0.00")
