"""The exact answers of the exported page's calculator: `python -m gpt2.study.interactive.grid` predicts them again.

A page has no kernel to simulate in. So each card the study knows has a table of predictions, over batches and lengths,
with the largest batch that fits and the first that does not: results/predicted/<gpu>/10-calculator-grid.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import pandas as pd

from gpt2.memory import gpus
from gpt2.study import paths, results
from gpt2.study.interactive import calculator
from gpt2.study.interactive.closed_form import Setting
from gpt2.study.runs import slug
from gpt2.study.words import parser

NAME = "10-calculator-grid"
BATCHES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64)  # sequences
FAMILIES = (  # every one of them on every card
    Setting(),
    Setting(length=512),
    Setting(precision="bf16", attention="sdpa"),
    Setting(precision="bf16", attention="sdpa", loss="chunked"),
)
BEYOND = 3  # batches that do not fit, kept of each family


def main(words: list[str] | None = None) -> int:
    """Predict and save every table; a line for each."""
    parser("interactive.grid", __doc__).parse_args(words)
    for gpu in gpus.names():
        table = save(gpu)
        print(f"{paths.shorten(path(gpu))}: {len(table)} predictions", flush=True)
    return 0


def path(gpu: str):
    """Where the table of a card is kept."""
    return results.table_path("predicted", NAME, slug(gpu))


def save(gpu: str) -> pd.DataFrame:
    """Predict a card's table and write it."""
    release = calculator.TORCH.get(gpu)
    facts = results.provenance("predicted", gpu=gpu, config={"steps": calculator.STEPS},
                               **({"torch": release} if release else {}))
    return results.save_table(calculator.grid(settings(gpu)), path(gpu), facts)


def load() -> pd.DataFrame:
    """The tables of all cards in one; a card without a table is left out."""
    folders = [paths.results(), paths.ROOT / "results"]
    found = [next((file for folder in folders if (file := folder / path(gpu).relative_to(paths.results())).is_file()),
                  None) for gpu in gpus.names()]
    tables = [results.load_table(file) for file in found if file]
    return pd.concat(tables, ignore_index=True).fillna("") if tables else calculator.grid([])


def settings(gpu: str) -> Iterator[tuple[Setting, str]]:
    """What is predicted for a card: the batches of every family in order, around and up to the largest that fits."""
    for family in FAMILIES:
        largest = largest_batch(family, gpu)
        beyond = [batch for batch in BATCHES if batch > largest + 1][:BEYOND - 1]
        wanted = {batch for batch in BATCHES if batch <= largest} | {largest, largest + 1, *beyond}
        yield from ((replace(family, batch=batch), gpu) for batch in sorted(wanted - {0}))


def largest_batch(family: Setting, gpu: str) -> int:
    """The largest batch that fits by simulation, looked for around the one that the formula names; 0 if none does."""
    batch = calculator.by_formula(family, gpu).largest_batch

    def fits(batch: int) -> bool:
        return batch == 0 or calculator.by_simulation(replace(family, batch=batch), gpu).fits

    while not fits(batch):
        batch -= 1
    while fits(batch + 1):
        batch += 1
    return batch


def differs(row: dict) -> list[str]:
    """The columns in which a row of a table is not what would be predicted now; none if the table is up to date."""
    names = asdict(Setting())
    now = calculator.grid([(Setting(**{name: row[name] for name in names}), row["gpu"])]).iloc[0]
    return [name for name in now.index if now[name] != row[name]]


if __name__ == "__main__":
    sys.exit(main())
