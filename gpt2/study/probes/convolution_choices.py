"""From the recorded convolutions to the table of choices that gpt2/memory/kernels/convolution_choices.py reads.

`python -m gpt2.study.probes.convolution_choices` makes it again from
results/measured/h200/convolution-probes.csv.gz. Only an H200's choices are known so far.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpt2.memory.kernels.convolution_choices import OBSERVED, PASSES, shape
from gpt2.study import paths
from gpt2.study.probes.convolution_tags import SHAPE, chosen

RECORDED = "measured/h200/convolution-probes.csv.gz"


def packed(columns: Iterable[str], lines: Iterable[dict], facts: dict) -> bytes:
    """A compressed CSV with its facts as `# key: json` lines on top: the same bytes for the same content."""
    text = io.StringIO()
    for key, value in facts.items():
        text.write(f"# {key}: {json.dumps(value)}\n")
    table = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    return gzip.compress(text.getvalue().encode(), 9, mtime=0)


def unpacked(path: Path) -> tuple[dict, list[dict]]:
    """The facts and the lines of such a file."""
    text = gzip.decompress(path.read_bytes()).decode().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in text if line.startswith("# "))
    lines = csv.DictReader(line for line in text if not line.startswith("# "))
    return {key: json.loads(value) for key, value in facts.items()}, list(lines)


def choices(lines: Iterable[dict]) -> Iterator[dict]:
    """Each line with engines instead of tags."""
    for line in lines:
        engines = {which: chosen(shape(which, line), int(line[f"{which}_bytes"]), line[which]) for which in PASSES}
        yield line | {which: str(engine) for which, engine in engines.items()}


def main() -> None:
    """Write the table."""
    facts, lines = unpacked(paths.find(RECORDED))
    written = paths.write(OBSERVED, packed((*SHAPE, *PASSES), choices(lines), facts))
    print(f"{len(lines)} convolutions, {OBSERVED.name} {'written' if written else 'as it was'}")


if __name__ == "__main__":
    main()
