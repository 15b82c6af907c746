"""What one pass of a convolution takes as workspace once cuDNN has chosen an engine: by formula, in bytes.

Letters: X input, W weight, Y output, in bytes as the engine reads them. Its tensor-core kernels want channels last; for
tensors that are channels first it converts some of X, W and Y in its workspace, with channels rounded up to what the
kernel loads at once (8 in 16 bits, 4 in TF32, 1 in kernels without that demand). Engines that divide their sum keep
partial results besides, in fp32:

* tiles: kernels that share tiles of the result among thread blocks (`segment_k`) keep one tile a block;
* split: kernels that are launched `count` deep (`split_k`) keep every tile but the last one's, and a counter each;
* weights: `count` partial W, added up by a kernel of their own (CUTLASS's ReduceSplitK, cuBLAS's splitKreduce);
* images: a 1 x 1 weight gradient as one matrix product an image, so one partial W each, then a sum over images;
* depthwise: eight partial W of every image, channels in 32s (channels-last weight gradients in 16 bits);
* winograd: F(4 x 4, 3 x 3): 36 numbers for every pair of channels and for every tile of 4 x 4 points and channel;
* fft: of whole images: the transforms of both operands before and after a transposition (or those of the result, where
  they are more), and one operand flipped; a transform of n x n real numbers is (n / 2 + 1) x n complex ones;
* fft-tiles: of images cut into tiles: the transforms of W, and of one tile of all X and Y, or of two at a time;
* groups: nothing partial, but one group after another, and what `count` of them need at a time;
* bytes: what no formula was found for (1 % of the passes recorded), as recorded.

`rest` is what stands beside them: 16 for a conversion, 131 where a kernel keeps its parameters on the card, counters.
Found in 23,064 passes recorded on an H200 with the names and grids of their kernels (cuDNN 9.19;
results/measured/h200/convolution-probes.csv.gz). What is converted and how often W or tiles are kept was read off names
and grids, and agrees with the bytes; `rest`, and the `count` of tiles, were read off the bytes. `groups` was read off
the bytes alone, of 12 passes of whole nets with 2 to 17 groups (convolution-nets.csv.gz beside it).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

FORWARD, INPUT, WEIGHT = "forward", "input", "weight"  # the three passes: output, input's gradient, weight's gradient


class Shape(NamedTuple):
    """One pass of one convolution, as cuDNN is asked for it."""

    which: str  # FORWARD, INPUT or WEIGHT
    dtype: str  # fp32, bf16 or fp16
    images: int
    channels: int  # of the input
    filters: int  # channels of the output
    image: tuple[int, int]  # points of the input, down and across
    kernel: tuple[int, int]
    out: tuple[int, int]  # points of the output
    stride: tuple[int, int]
    groups: int = 1
    channels_last: bool = False
    tf32: bool = True  # whether fp32 may run in TF32

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "fp32" else 2


class Engine(NamedTuple):
    """What an engine does to memory: see the module's docstring. Written as seven words."""

    converted: str  # those of "xwy" that are converted; "XWY" where fp32 is made of 16 bits
    input_channels: int  # channels are rounded up to a multiple of this
    filters: int
    partial: str  # tiles, split, weights, images, depthwise, winograd, fft, fft-tiles, groups, bytes or "-"
    tile: str  # rows x columns of a partial tile, or "-"
    count: int
    rest: int

    def __str__(self):
        return " ".join(map(str, self))


@functools.cache
def engine(words: str) -> Engine:
    """The engine that is written so; ValueError if it is none."""
    converted, input_channels, filters, partial, tile, count, rest = words.split(" ")
    return Engine(converted, int(input_channels), int(filters), partial, tile, int(count), int(rest))


NOTHING = Engine("-", 1, 1, "-", "-", 0, 0)


def up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def _padded(shape: Shape, engine: Engine) -> tuple[int, int]:
    """Channels and filters of one group, rounded up."""
    return (
        up(shape.channels // shape.groups, engine.input_channels),
        up(shape.filters // shape.groups, engine.filters),
    )


def _sizes(shape: Shape, engine: Engine) -> dict[str, int]:
    """Elements of X, W and Y with their channels rounded up."""
    channels, filters = _padded(shape, engine)
    return {
        "x": shape.images * shape.groups * channels * math.prod(shape.image),
        "w": shape.groups * filters * channels * math.prod(shape.kernel),
        "y": shape.images * shape.groups * filters * math.prod(shape.out),
    }


def _tiles(shape: Shape, engine: Engine) -> int:
    """Tiles of the pass's result seen as a matrix; of a grouped weight, a matrix for each point of the kernel."""
    rows, columns = map(int, engine.tile.split("x"))
    channels, filters = _padded(shape, engine)
    if shape.which == WEIGHT:
        points = math.prod(shape.kernel)
        if shape.groups == 1:
            return math.ceil(filters / rows) * math.ceil(channels * points / columns)
        return math.ceil(shape.groups * filters / rows) * points * math.ceil(channels / columns)
    points, deep = (shape.out, filters) if shape.which == FORWARD else (shape.image, channels)
    return math.ceil(shape.images * math.prod(points) / rows) * math.ceil(shape.groups * deep / columns)


def _partial(shape: Shape, engine: Engine) -> int:
    """Bytes of the partial results."""
    kind, count = engine.partial, engine.count
    if kind in ("tiles", "split"):
        tile_bytes = 4 * math.prod(map(int, engine.tile.split("x")))
        if kind == "tiles":
            return count * tile_bytes
        tiles = _tiles(shape, engine)
        return (count - 1) * tiles * tile_bytes + 4 * tiles * count
    if kind == "weights":
        return count * 4 * _sizes(shape, engine)["w"]
    if kind == "images":
        return shape.images * 4 * _sizes(shape, engine)["w"]
    if kind == "depthwise":
        return shape.images * 8 * 4 * math.prod(shape.kernel) * up(shape.channels, 32)
    pairs, both = shape.channels * shape.filters, shape.channels + shape.filters
    if kind == "winograd":
        points = shape.image if shape.which == INPUT else shape.out
        return 36 * 4 * (pairs + both * shape.images * math.prod(math.ceil(n / 4) for n in points))
    if kind.startswith("fft"):
        return _transforms(shape, engine)
    return count if kind == "bytes" else 0


def _transforms(shape: Shape, engine: Engine) -> int:
    """Bytes of what engines by Fourier transform keep."""
    down, across = map(int, engine.tile.split("x"))
    transform_bytes = 8 * (down // 2 + 1) * across
    number = {
        "x": shape.images * shape.channels,
        "w": shape.channels * shape.filters,
        "y": shape.images * shape.filters,
    }
    if engine.partial == "fft-tiles":
        whole = shape.image[0] + shape.kernel[0] <= down + 1 and shape.image[1] + shape.kernel[1] <= across + 1
        return transform_bytes * (number["w"] + (1 if whole else 2) * (number["x"] + number["y"]))
    result = number.pop({FORWARD: "y", INPUT: "x", WEIGHT: "w"}[shape.which])
    flipped = 4 * _sizes(shape, engine)["y" if shape.which == WEIGHT else "w"]
    return flipped + 2 * transform_bytes * max(sum(number.values()), result)


def workspace(shape: Shape, engine: Engine) -> int:
    """Bytes that this engine asks for."""
    sizes = _sizes(shape, engine)
    width = 4 if engine.converted.isupper() else shape.element_bytes
    converted = width * sum(size for letter, size in sizes.items() if letter in engine.converted.lower())
    if engine.partial == "groups":
        return min(shape.groups, engine.count) * (converted // shape.groups + engine.rest)
    return converted + _partial(shape, engine) + engine.rest
