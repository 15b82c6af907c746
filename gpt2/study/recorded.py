"""Times that a real GPU was measured with: read from results/measured/<folder>/, always with the card and the date.

No machine computes a time anew for a page: without a GPU nothing here is "now".
"""

from __future__ import annotations

from functools import cache

import pandas as pd

from gpt2.study import results
from gpt2.study.runs import HOME
from gpt2.study.tables import Shown


@cache
def table(name: str, folder: str = HOME) -> pd.DataFrame:
    """A measured table, such as `05-phases`; its provenance is in `.attrs`."""
    return results.load_table(f"measured/{folder}/{name}.csv")


def where(*tables: pd.DataFrame) -> str:
    """`Recorded on NVIDIA H200 on 2026-11-29, torch 2.11.0.` for captions."""
    facts = tables[0].attrs
    return f"Recorded on {facts['gpu']} on {facts['date'][:10]}, torch {facts['torch'].partition('+')[0]}."


def shown(rows: pd.DataFrame, what: str, *sources: pd.DataFrame) -> Shown:
    """Rows made of recorded tables, with a caption that says of which."""
    return Shown(rows, f"{what.rstrip('.')}. {where(*sources)}")


def subtitle(source: pd.DataFrame, recipe: str = "") -> str:
    """The line under a figure's title: the recipe, the release, the card, the date."""
    facts = source.attrs
    words = (recipe, f"torch {facts['torch'].partition('+')[0]}", f"recorded on {facts['gpu']} on {facts['date'][:10]}")
    return " · ".join(word for word in words if word)


def of(name: str, folder: str = HOME, **wanted) -> pd.DataFrame:
    """The rows of a measured table with these values, in order."""
    rows = table(name, folder)
    for column, value in wanted.items():
        rows = rows[rows[column] == value]
    return rows


def one(name: str, column: str, folder: str = HOME, **wanted) -> float:
    """A single number of a measured table; KeyError unless just one row has these values."""
    rows = of(name, folder, **wanted)
    if len(rows) != 1:
        raise KeyError(f"{name}: {len(rows)} rows with {wanted}")
    return rows[column].item()
