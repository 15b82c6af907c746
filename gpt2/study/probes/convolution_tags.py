"""Recorded convolutions made short: one line each, with the bytes of every workspace and the engine that asked for it.

A tag says what ran in a pass, in three words: the kernels in order, a letter each (legend below); the main one, by its
family, kind and tile; and how many thread blocks deep it and the kernel that adds up were launched.
"""

from __future__ import annotations

import functools
import itertools
import math
import re

from gpt2.memory.kernels.convolution_choices import PASSES
from gpt2.memory.kernels.convolution_engines import FORWARD, INPUT, NOTHING, WEIGHT, Engine, Shape, workspace

SHAPE = ("N", "C", "H", "K", "R", "stride", "pad", "groups", "dtype", "last", "tf32", "dims")
COLUMNS = (*SHAPE, *(f"{name}_bytes" for name in PASSES), *PASSES)
MAIN = "*"
MOST_BLOCKS = 2 * 132  # that share tiles: two on each SM of an H200
LETTERS = {  # of the kernels around the main one
    "nchwToNhwcKernel": "a",
    "nhwcToNchwKernel": "b",
    "convertTensor_kernel": "c",
    "nchwToFoldedNhwcKernel": "f",
    "foldedNhwcToNchwKernel": "F",
    "nhwcToFoldedNhwcKernel": "g",
    "foldedNhwcToNhwcKernel": "G",
    "reduce_wgrad_nchw_helper": "h",
    "init_device_workspace_kernel": "i",
    "kern_precompute_indices": "k",
    "flip_filter": "l",
    "Memset": "m",
    "Memcpy": "M",
    "nhwcAddPaddingKernel": "p",
    "nchwAddPaddingKernel": "q",
    "ReduceSplitK": "r",
    "splitKreduce_kernel": "R",
    "scalePackedTensor_kernel": "s",
    "nhwcSliceCKernel": "S",
    "tensorTransformGeneric": "t",
}
CONVERSIONS = "abcfFgGpqt"
_HELPER = re.compile("|".join(LETTERS))
_XMMA = re.compile(r"(sm\d+)_xmma_(\w+?)_tilesize([\dx]+)_\w*?(segment_k_on|split_k|strided|)(?:_kernel\w*|_off\w*)?$")
_CUTLASS = re.compile(r"(cutlass_(?:80_)?\w*?(?:tensorop|simt)_\w+)")
_IMPLICIT = re.compile(r"Conv2d(Fprop|Dgrad|Wgrad)")
_GEMM_SHAPE = re.compile(r"GemmShapeILi(\d+)ELi(\d+)ELi(\d+)E")


@functools.cache
def kernel(name: str) -> str:
    """A kernel's name without its template: a letter for those around the main one, or family, kind and tile."""
    if (found := _HELPER.search(name)) and not name.startswith("sm"):
        return LETTERS[found[0]]
    if found := _XMMA.search(name):
        kind = found[2].replace("_implicit_gemm", "")
        return ".".join(part for part in ("xmma", found[1], kind, found[3], found[4]) if part)
    if (found := _IMPLICIT.search(name)) and (tile := _GEMM_SHAPE.search(name)):
        return f"cutlass.{found[1].lower()}.{'x'.join(tile.groups())}"
    if found := _CUTLASS.search(name):
        return found[1]
    plain = name.replace("(anonymous namespace)", "").removeprefix("void ")
    return re.split(r"[<(]", plain)[0].split("::")[-1] or "kernel"


def tag(kernels: list[list]) -> str:
    """What ran, in three words: see the module's docstring. `kernels` holds [name, grid, block] of each."""
    names = [kernel(name) for name, *_ in kernels]
    steps = re.sub(r"\*+", MAIN, "".join(name if len(name) == 1 else MAIN for name in names))
    main = list(dict.fromkeys(name for name in names if len(name) > 1))
    deep = {grid[2] for _, grid, _ in kernels if grid and len(grid) == 3}
    deep |= {grid[1] for (_, grid, _), name in zip(kernels, names, strict=True) if grid and name.startswith("xmma")}
    pieces = sorted(number for number in deep if number > 1)
    return f"{steps or '-'} {'+'.join(main[:2]) or '-'} {','.join(map(str, pieces)) or '-'}"


def reduced(row: dict) -> dict:
    """One recorded convolution as a line: of each pass, the bytes taken besides its result, and the tag."""
    out = (row["H"] + 2 * row["pad"] - row["R"]) // row["stride"] + 1
    made = {
        FORWARD: row["N"] * row["K"] * out ** row["dims"],
        INPUT: row["N"] * row["C"] * row["H"] ** row["dims"],
        WEIGHT: row["K"] * row["C"] // row["groups"] * row["R"] ** row["dims"],
    }
    line = {name: row[name] for name in SHAPE}
    for name in PASSES:
        taken = [size for size in row.get(name, ()) if size > 0]
        result = made[name] * (4 if row["dtype"] == "fp32" else 2)
        if result in taken:
            taken.remove(result)
        line[f"{name}_bytes"] = max(taken, default=0)
        line[name] = tag(row.get(f"{name} kernels") or [])
    return line


def _multiples(channels: int, own: int) -> list[int]:
    """What channels may be rounded up to, the kernel's usual one first; one of each result."""
    by_result = {-(-channels // multiple) * multiple: multiple for multiple in (8, 4, 2, 1, own)}
    return sorted(by_result.values(), key=lambda multiple: (multiple != own, multiple))


def _converted(which: str, steps: str) -> str:
    """Those of "xwy" that the kernels before and after the main one convert."""
    before, _, after = steps.partition(MAIN)
    operands, result = {FORWARD: ("xw", "y"), INPUT: ("yw", "x"), WEIGHT: ("xy", "w")}[which]
    loaded = operands[: sum(letter in CONVERSIONS for letter in before)]
    return loaded + (result if set(after) & set(CONVERSIONS) else "")


def _partials(asked: Shape, steps: str, main: str, pieces: list[int], left: int) -> list[tuple]:
    """(kind, tile, count) of the partial results that these kernels may keep."""
    found: list[tuple] = [("-", "-", 0)]
    tile = re.search(r"\.(\d+)x(\d+)x\d+", main)
    if steps.endswith("h"):
        found.append(("images", "-", 0))
    if asked.which == WEIGHT and set("rR") & set(steps):
        copy_bytes = 4 * math.prod(asked.kernel) * asked.filters * (asked.channels // asked.groups)
        by_size = [] if set(steps) & set(CONVERSIONS) else [left // copy_bytes]  # cuBLAS asks for the most it may need
        found += [("weights", "-", count) for count in (*pieces, 1, *by_size)]
    if tile and "i" in steps:
        rows, columns = map(int, tile.groups())
        count = left // (4 * rows * columns)
        found += [("tiles", f"{rows}x{columns}", count)] if count <= MOST_BLOCKS else []
    if tile and "sm80" in main:
        for rows, columns in (tile.groups(), tile.groups()[::-1]):
            found += [("split", f"{rows}x{columns}", count) for count in pieces]
    if main.startswith("wgrad2d_c1_k1_nhwc"):
        found.append(("depthwise", "-", 0))
    if main.startswith("winograd") and "4x4" in main:
        found.append(("winograd", "-", 0))
    if transform := re.match(r"fft2d_r2c_(\d+x\d+)", main):
        found += [(kind, transform[1], 0) for kind in ("fft", "fft-tiles")]
    return found


def chosen(asked: Shape, size: int, tagged: str) -> Engine:
    """The engine that asks for these bytes and fits the kernels that ran; as `bytes` where none does."""
    if not size:
        return NOTHING
    steps, main, deep = tagged.split(" ")
    pieces = [int(number) for number in deep.split(",") if number != "-"]
    seen = _converted(asked.which, steps)
    own = 8 if asked.element_bytes == 2 else 4
    letters = ["".join(some) for n in range(4) for some in itertools.combinations("xwy", n)]
    if asked.element_bytes == 2 and "tf32" in main:
        letters += [some.upper() for some in letters]
    best = None
    for converted, channels, filters in itertools.product(
        letters, _multiples(asked.channels // asked.groups, own), _multiples(asked.filters // asked.groups, own)
    ):
        bare = Engine(converted or "-", channels, filters, "-", "-", 0, 0)
        left = size - workspace(asked, bare)
        for kind, tile, count in _partials(asked, steps, main, pieces, left) if left >= 0 else ():
            found = bare._replace(partial=kind, tile=tile, count=count)
            rest = size - workspace(asked, found)
            if 0 <= rest <= 4096:
                unusual = (channels != own) + (filters != own)
                key = (len(set(converted.lower()) ^ set(seen)), unusual, rest)
                if best is None or key < best[0]:
                    best = key, found._replace(rest=rest)
    if best:
        return best[1]
    bare = Engine("".join(sorted(seen, key="xwy".index)) or "-", own, own, "bytes", "-", 0, 0)
    left = size - workspace(asked, bare)
    return bare._replace(count=left) if left >= 0 else NOTHING._replace(partial="bytes", count=size)
