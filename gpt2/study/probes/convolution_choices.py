"""From the recorded convolutions to the tables of choices that gpt2/memory/kernels/convolution_choices.py reads.

`python -m gpt2.study.probes.convolution_choices` makes them again from two files of results/measured/h200:
convolution-probes.csv.gz, which holds the kernels that ran, and convolution-nets.csv.gz, which holds bytes only. There
the engine is the one of the most similar probe that asks for exactly these bytes. Only an H200's choices are known.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpt2.memory.kernels.convolution_choices import IN_NETS, OBSERVED, PASSES, place, shape, shape_of_any
from gpt2.memory.kernels.convolution_engines import NOTHING, Engine, Shape, engine, workspace
from gpt2.study import paths
from gpt2.study.probes.convolution_tags import SHAPE, chosen
from gpt2.study.words import parser

RECORDED = "measured/h200/convolution-probes.csv.gz"
NETS = "measured/h200/convolution-nets.csv.gz"
FIELDS = Shape._fields
OTHER_FIELDS = ("net", "bytes")
MOST_PIECES = 132
GROUPWISE = {2: engine("xwy 8 8 groups - 8 16"), 4: engine("xwy 4 4 groups - 8 16")}  # by bytes of an element


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


def told(asked: Shape, size: int, probes: Iterable[tuple[Shape, Engine]]) -> Engine:
    """The engine of the nearest probe that asks for these bytes, in other pieces if need be; else `bytes`."""
    if not size:
        return NOTHING
    here = place(asked)
    near = sorted((math.dist(here, place(other)), n, found) for n, (other, found) in enumerate(probes))
    engines = list(dict.fromkeys(found for *_, found in near if found.partial != "bytes"))
    if asked.groups > 1:
        engines.append(GROUPWISE[asked.element_bytes])
    in_pieces = dict.fromkeys(e._replace(count=0) for e in engines if e.partial in ("tiles", "split", "weights"))
    engines += [e._replace(count=count) for e in in_pieces for count in range(1, MOST_PIECES + 1)]
    bare = NOTHING._replace(partial="bytes", count=size)
    return next((found for found in engines if workspace(asked, found) == size), bare)


def passes(lines: Iterable[dict], probes: list[tuple[Shape, Engine]]) -> Iterator[dict]:
    """Each pass of a net that is not among the probes, with its engine."""
    known = {asked for asked, _ in probes}
    kinds: dict[tuple, list] = {}
    for asked, found in probes:
        kinds.setdefault(_kind(asked), []).append((asked, found))
    for line in lines:
        asked = shape_of_any(line)
        if asked not in known:
            yield line | {"engine": str(told(asked, int(line["bytes"]), kinds.get(_kind(asked), [])))}


def _kind(asked: Shape) -> tuple:
    return asked.which, asked.element_bytes, asked.channels_last, asked.groups == 1


def main(words: list[str] | None = None) -> None:
    """Write the tables."""
    parser("probes.convolution_choices", __doc__).parse_args(words)
    facts, lines = unpacked(paths.find(RECORDED))
    lines = list(choices(lines))
    written = paths.write(OBSERVED, packed((*SHAPE, *PASSES), lines, facts))
    print(f"{len(lines)} convolutions, {OBSERVED.name} {'written' if written else 'as it was'}")
    probes = [(shape(which, line), engine(line[which])) for line in lines for which in PASSES]
    facts, lines = unpacked(paths.find(NETS))
    lines = list(passes(lines, probes))
    written = paths.write(IN_NETS, packed((*FIELDS, "engine"), lines, facts))
    print(f"{len(lines)} passes of nets, {IN_NETS.name} {'written' if written else 'as it was'}")


if __name__ == "__main__":
    main()
