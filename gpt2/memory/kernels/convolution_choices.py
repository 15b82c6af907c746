"""Which engine cuDNN chooses: as observed, and for a convolution nobody observed, as for those most like it.

cuDNN's heuristic is not published, and the recording shows that it is no formula. Of 16 images of 64 x 32 x 32, stride
2, a weight gradient for 64 filters is summed in 20 pieces, whether the kernel has 1 x 1 points or 9 x 9 (1 tile or
81); with 24 to 128 images it is 13, with 6 or 8 it is 3. The same few numbers of pieces come back everywhere, and
decision trees grown on the recording are right about 65 to 85 % of the engines that they were not grown on. It looks
like a table of tuned convolutions, and so it is modelled: convolution_choices.csv.gz holds the engine of each pass of
7,688 convolutions observed on an H200 (cuDNN 9.19), convolution_passes.csv.gz that of 526 more passes in nets, told by
their bytes (`python -m gpt2.study.probes.convolution_choices` makes both of the recordings). One that is in neither
takes the engine for which its nearest five vote.

How often that meets what cuDNN does, on convolutions left out of the table: to the byte in 77 % of the passes, within
2 % of workspace and tensors in 86 % (by pass and dtype: MET in tests/test_convolution.py); on the average it says 2 %
too much. On the 526 passes in nets, before they were added: 74 % and 87 %. Weight gradients and channels-last fp32 are
the worst. Without TF32 cuDNN takes Fourier transforms, with workspaces of up to 9 GB; there only nets at batches of 8
and 16 were observed.

A rule besides: images of one point need nothing (85 of 90 passes in two nets; the other five took up to 6.5 kB).

Hardly observed: convolutions of one dimension (two nets; else taken as the square ones of as many points) and groups of
more than one channel (five convolutions of the list and two nets). Not observed: images that are not square; 3-d and
dilated ones (taken as needing nothing, and as if not dilated); other cards and cuDNN releases (taken as an H200 with
9.19); `cudnn.benchmark`, which chooses by timing.
"""

from __future__ import annotations

import csv
import functools
import gzip
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from gpt2.memory.kernels.convolution_engines import FORWARD, INPUT, NOTHING, WEIGHT, Engine, Shape, engine

OBSERVED = Path(__file__).with_name("convolution_choices.csv.gz")  # a line a convolution, a column a pass
IN_NETS = Path(__file__).with_name("convolution_passes.csv.gz")  # a line a pass, in any shape
NEAREST = 5  # that vote
PASSES = (FORWARD, INPUT, WEIGHT)


class Choice(NamedTuple):
    """An engine observed, and where."""

    shape: Shape
    place: tuple[float, ...]
    engine: Engine


def _even(channels: int) -> int:
    """What channels are a multiple of, as far as kernels care."""
    return math.gcd(channels, 8)


def place(shape: Shape) -> tuple[float, ...]:
    """A convolution as a point: near ones get like engines.

    Sizes count by their ratio, and three traits as much as a double. Other weights, half or twice as much for any of
    these, change the share that is met by less than a percent.

    Two things count for some only. Channels-first pointwise convolutions are matrix products whose rows are images:
    kernels load 8 points of those at once, and other kernels run where points are no multiple of that. And weight
    gradients of others are divided according to how few tiles they have.
    """
    kernel, points = math.prod(shape.kernel), math.prod(shape.image)
    tiles = math.ceil(shape.filters / 64) * math.ceil(shape.channels * kernel / 64)
    return (
        math.log2(shape.images * math.prod(shape.out)),
        math.log2(shape.channels),
        math.log2(shape.filters),
        math.log2(shape.channels * kernel),
        math.log2(kernel),
        math.log2(math.prod(shape.stride)),
        math.log2(_even(shape.channels)),
        math.log2(_even(shape.filters)),
        math.log2(shape.groups),
        shape.channels < 4,
        shape.kernel == shape.stride,
        shape.dtype == "fp16",
        math.log2(_even(points)) if kernel == 1 else 0,
        math.log2(tiles) if kernel > 1 and shape.which == WEIGHT else 0,
    )


def _kind(shape: Shape) -> tuple:
    """What cuDNN has different engines for; only convolutions of one kind are compared."""
    grouped = 0 if shape.groups == 1 else 2 if shape.groups == shape.channels else 1
    tf32 = shape.tf32 or shape.element_bytes == 2
    pointwise = math.prod(shape.kernel) == 1
    return shape.which, shape.element_bytes, shape.channels_last, grouped, pointwise, tf32


class Choices:
    """Engines observed."""

    def __init__(self, observed: Iterable[tuple[Shape, Engine]]):
        self.exactly: dict[Shape, Engine] = {}
        self.kinds: dict[tuple, list[Choice]] = {}
        for shape, chosen in observed:
            self.exactly[shape] = chosen
            self.kinds.setdefault(_kind(shape), []).append(Choice(shape, place(shape), chosen))

    def alike(self, shape: Shape) -> list[Choice]:
        """The observed ones of its kind; where none was, those with larger kernels, and those with TF32."""
        *kind, pointwise, tf32 = _kind(shape)
        likely = ((pointwise, tf32), (False, tf32), (pointwise, True), (False, True))
        return next((found for some in likely if (found := self.kinds.get((*kind, *some)))), [])

    def engine(self, shape: Shape) -> Engine:
        """The one observed for this convolution, or the nearest of those that the nearest few vote for."""
        if shape in self.exactly:
            return self.exactly[shape]
        if math.prod(shape.image) == 1:  # a matrix product, channels first and last at once: nothing to convert
            return NOTHING
        here = place(shape)
        near = sorted((math.dist(here, choice.place), n, choice) for n, choice in enumerate(self.alike(shape)))
        votes: dict[tuple, float] = {}
        for distance, _, choice in near[:NEAREST]:
            what = choice.engine.converted, choice.engine.partial
            votes[what] = votes.get(what, 0) + 1 / (distance + 0.03)
        wins = max(votes, key=votes.__getitem__, default=None)
        return next((c.engine for *_, c in near if (c.engine.converted, c.engine.partial) == wins), NOTHING)


def _lines(path: Path) -> Iterable[dict]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(row for row in file if not row.startswith("#"))


def read() -> Iterable[tuple[Shape, Engine]]:
    """The two tables that come with the package."""
    for line in _lines(OBSERVED):
        for which in PASSES:
            yield shape(which, line), engine(line[which])
    for line in _lines(IN_NETS):
        yield shape_of_any(line), engine(line["engine"])


def shape(which: str, line: dict) -> Shape:
    """One pass of a line: images and kernels are square, or with dims 1 have a height of 1."""
    names = ("N", "C", "H", "K", "R", "stride", "pad", "groups", "dims")
    N, C, H, K, R, stride, pad, groups, dims = (int(line[name]) for name in names)
    last, tf32 = (str(line[name]) == "True" for name in ("last", "tf32"))
    out = (H + 2 * pad - R) // stride + 1
    image, kernel, out, stride = ((size if dims == 2 else 1, size) for size in (H, R, out, stride))
    return Shape(which, line["dtype"], N, C, K, image, kernel, out, stride, groups, last, tf32)


def shape_of_any(line: dict) -> Shape:
    """The pass that a line with a column for each of Shape's fields tells; sizes as `down x across`."""

    def value(text: str):
        if text in ("True", "False"):
            return text == "True"
        if text[0].isdigit():
            return int(text) if text.isdigit() else tuple(map(int, text.split("x")))
        return text

    return Shape(*(value(line[name]) for name in Shape._fields))


@functools.cache
def observed() -> Choices:
    """The choices that come with the package."""
    return Choices(read())


@functools.lru_cache(maxsize=4096)
def choose(shape: Shape) -> Engine:
    """The engine cuDNN is taken to choose."""
    return observed().engine(shape)
