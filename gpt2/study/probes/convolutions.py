"""Convolutions one by one on a real GPU: which workspace does cuDNN take, for which kernel?

`python -m gpt2.study.probes.convolutions` runs each convolution's three passes apart (forward, input's gradient,
weight's gradient) and writes results/measured/<gpu>/convolution-probes.csv.gz: a line a convolution, with the bytes and
a tag of each pass (convolution_tags.py). It is the evidence behind gpt2/memory/kernels/convolution_engines.py, and what
gpt2/memory/kernels/convolution_choices.csv.gz is made of.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from gpt2.memory.kernels.convolution_engines import FORWARD, INPUT, WEIGHT
from gpt2.study import paths
from gpt2.study.probes.convolution_choices import packed, unpacked
from gpt2.study.probes.convolution_rows import configurations
from gpt2.study.probes.convolution_tags import COLUMNS, SHAPE, reduced
from gpt2.study.probes.runs import provenance, run
from gpt2.study.runs import slug
from gpt2.study.words import no_gpu, parser

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SECONDS = 300  # the likeliest come first


def passes(row: dict) -> Iterator[tuple[str, Callable]]:
    """The three passes of one convolution."""
    dtype, groups, dims = DTYPES[row["dtype"]], row["groups"], row["dims"]
    torch.backends.cudnn.allow_tf32 = row["tf32"]
    layout = torch.channels_last if row["last"] else torch.contiguous_format

    def half(count, channels, size):
        sizes = (count, channels, *[size] * dims)
        return torch.empty(sizes, device="cuda", dtype=dtype, memory_format=layout).fill_(0.5)

    x = half(row["N"], row["C"], row["H"])
    w = half(row["K"], row["C"] // groups, row["R"])
    where = ([row["stride"]] * dims, [row["pad"]] * dims, [1] * dims, False, [0] * dims, groups)
    dy = torch.empty_like(torch.ops.aten.convolution(x, w, None, *where)).fill_(0.5)
    yield FORWARD, lambda: torch.ops.aten.convolution(x, w, None, *where)
    for name, mask in ((INPUT, [True, False, False]), (WEIGHT, [False, True, False])):
        yield name, lambda mask=mask: torch.ops.aten.convolution_backward(dy, x, w, None, *where, mask)


def recorded(place: Path, facts: dict) -> list[dict]:
    """The lines of an earlier run; none of those of another card or release."""
    if not place.is_file():
        return []
    before, lines = unpacked(place)
    same = all(before.get(key) == facts[key] for key in ("gpu", "torch", "cuda", "cudnn"))
    return lines if same else []


def main(words: list[str] | None = None) -> int:
    """Record what these seconds allow, beside what an earlier run has recorded."""
    options = parser("probes.convolutions", __doc__)
    options.add_argument("file", nargs="?", default="", help="another file to write")
    options.add_argument("seconds", nargs="?", type=float, default=SECONDS, help="none is begun later (%(default)s)")
    asked = options.parse_args(words)
    if no_gpu():
        return 2
    torch.cuda.init()
    folder = paths.results_of("measured", slug(torch.cuda.get_device_name()))
    place = Path(asked.file) if asked.file else folder / "convolution-probes.csv.gz"
    facts = provenance() | {"command": "python -m gpt2.study.probes.convolutions"}
    lines = recorded(place, facts)
    done = {tuple(line[name] for name in SHAPE) for line in lines}
    missing = [row for row in configurations() if tuple(str(row[name]) for name in SHAPE) not in done]
    rows = run(missing, passes, time.time() + asked.seconds, warm=True)
    lines += [reduced(row) for row in rows if "error" not in row]
    paths.write(place, packed(COLUMNS, lines, facts))
    print(f"{len(rows)} of {len(missing)} convolutions recorded, {len(lines)} in {paths.shorten(place)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
