"""The convolutions to record: those of nets that people train, lines along one size, and some anywhere.

Sizes by letter: N images, C channels, H height and width, K filters, R height and width of the kernel.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain

from gpt2.study.probes.convolution_tags import SHAPE

MOST_ELEMENTS = 2**29  # of a tensor: about 2 GiB
MOST_OPERATIONS = 4e12  # of a pass
# fmt: off
_CHANNELS = (8, 12, 16, 20, 24, 30, 32, 40, 48, 56, 60, 63, 65, 72, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512,
             768, 1024)
VARIED = {"N": (1, 2, 3, 4, 6, 8, 12, 20, 24, 32, 48, 64, 96, 128, 256),
          "H": (4, 7, 8, 14, 16, 24, 28, 30, 33, 48, 56, 64, 96, 112, 128),
          "C": (1, 2, 3, 4, 5, 6, 7, *_CHANNELS),
          "K": (1, 2, 3, 4, 5, 6, *_CHANNELS),
          "R": (1, 2, 4, 5, 7, 9), "stride": (2, 3)}


def nets() -> Iterator[tuple]:
    """(C, H, K, R, stride, pad, groups) of nets that people train."""
    resnet = [(3, 224, 64, 7, 2, 3, 1)]
    for width, size in ((64, 56), (128, 28), (256, 14), (512, 7)):
        resnet += [(width, size, width, 3, 1, 1, 1), (width, size, 4 * width, 1, 1, 0, 1),
                   (4 * width, size, width, 1, 1, 0, 1)]
        if width > 64:
            resnet += [(width // 2, 2 * size, width, 3, 2, 1, 1), (width // 2, 2 * size, width, 1, 2, 0, 1),
                       (2 * width, 2 * size, width, 1, 1, 0, 1), (width, 2 * size, width, 3, 2, 1, 1),
                       (2 * width, 2 * size, 4 * width, 1, 2, 0, 1)]
    vgg = [(c, s, k, 3, 1, 1, 1) for c, s, k in ((3, 224, 64), (64, 224, 64), (64, 112, 128), (128, 112, 128),
                                                 (128, 56, 256), (256, 56, 256), (256, 28, 512), (512, 28, 512),
                                                 (512, 14, 512))]
    cifar = [(c, s, k, 3, st, 1, 1) for c, s, k, st in (
        (3, 32, 16, 1), (16, 32, 16, 1), (16, 32, 32, 2), (32, 16, 32, 1), (32, 16, 64, 2), (64, 8, 64, 1),
        (3, 32, 32, 1), (32, 32, 32, 1), (32, 32, 64, 1), (64, 32, 64, 1), (3, 32, 64, 1), (64, 32, 128, 1),
        (64, 32, 128, 2), (128, 16, 128, 1), (128, 16, 256, 1), (128, 16, 256, 2), (256, 8, 256, 1), (256, 8, 512, 2),
        (512, 4, 512, 1), (128, 32, 128, 1), (64, 16, 128, 1), (256, 16, 256, 1))]
    cifar += [(64, 32, 128, 1, 2, 0, 1), (128, 16, 256, 1, 2, 0, 1), (256, 8, 512, 1, 2, 0, 1),
              (3, 32, 6, 5, 1, 0, 1), (6, 14, 16, 5, 1, 0, 1), (1, 28, 32, 3, 1, 0, 1), (32, 26, 64, 3, 1, 0, 1),
              (1, 28, 32, 3, 1, 1, 1), (32, 14, 64, 3, 1, 1, 1), (1, 28, 16, 5, 1, 2, 1), (16, 14, 32, 5, 1, 2, 1),
              (3, 64, 32, 3, 2, 1, 1), (32, 32, 64, 3, 2, 1, 1), (64, 16, 128, 3, 2, 1, 1), (3, 64, 64, 4, 2, 1, 1),
              (64, 32, 128, 4, 2, 1, 1), (128, 16, 256, 4, 2, 1, 1), (256, 8, 512, 4, 2, 1, 1)]
    unet = [(c, s, k, 3, 1, 1, 1) for s in (256, 128, 64) for c, k in ((1, 64), (3, 64), (3, 32), (32, 32), (64, 64))]
    unet += [(c, s, k, 3, 1, 1, 1) for c, s, k in (
        (32, 128, 64), (32, 64, 64), (64, 128, 128), (64, 64, 128), (128, 128, 128), (128, 64, 128), (128, 64, 256),
        (128, 32, 256), (256, 64, 256), (256, 32, 256), (256, 32, 512), (256, 16, 512), (512, 32, 512), (512, 16, 512),
        (512, 16, 1024), (1024, 16, 1024), (1024, 32, 512), (512, 64, 256), (256, 128, 128), (128, 256, 64),
        (320, 64, 320), (640, 32, 640), (1280, 16, 1280), (320, 32, 640), (640, 16, 1280), (4, 64, 320), (320, 64, 4))]
    unet += [(64, 256, 1, 1, 1, 0, 1), (64, 128, 2, 1, 1, 0, 1), (64, 256, 3, 1, 1, 0, 1), (32, 256, 3, 1, 1, 0, 1),
             (64, 128, 21, 1, 1, 0, 1), (64, 64, 3, 3, 1, 1, 1), (320, 64, 640, 1, 1, 0, 1)]
    convnext = [(3, 224, 96, 4, 4, 0, 1), (96, 56, 192, 2, 2, 0, 1), (192, 28, 384, 2, 2, 0, 1),
                (384, 14, 768, 2, 2, 0, 1), (3, 224, 768, 16, 16, 0, 1), (3, 224, 384, 16, 16, 0, 1),
                (3, 32, 192, 4, 4, 0, 1), (3, 224, 1024, 14, 14, 0, 1)]
    convnext += [(w, s, w, 7, 1, 3, w) for w, s in ((96, 56), (192, 28), (384, 14), (768, 7), (128, 56), (256, 28))]
    mobile = [(3, 224, 32, 3, 2, 1, 1), (32, 112, 16, 1, 1, 0, 1), (16, 112, 96, 1, 1, 0, 1), (96, 56, 24, 1, 1, 0, 1),
              (24, 56, 144, 1, 1, 0, 1), (144, 28, 32, 1, 1, 0, 1), (32, 28, 192, 1, 1, 0, 1),
              (192, 14, 64, 1, 1, 0, 1), (64, 14, 384, 1, 1, 0, 1), (384, 14, 96, 1, 1, 0, 1),
              (160, 7, 960, 1, 1, 0, 1), (320, 7, 1280, 1, 1, 0, 1)]
    mobile += [(w, s, w, 3, st, 1, w) for w, s, st in ((32, 112, 1), (96, 112, 2), (144, 56, 1), (144, 56, 2),
                                                       (192, 28, 1), (384, 14, 1), (576, 14, 2), (960, 7, 1))]
    mobile += [(144, 56, 144, 5, 2, 2, 144), (240, 28, 240, 5, 1, 2, 240), (128, 28, 128, 3, 1, 1, 32),
               (256, 14, 256, 3, 1, 1, 8), (128, 56, 128, 3, 1, 1, 32)]
    old = [(3, 224, 64, 11, 4, 2, 1), (64, 27, 192, 5, 1, 2, 1), (192, 13, 384, 3, 1, 1, 1), (384, 13, 256, 3, 1, 1, 1),
           (256, 13, 256, 3, 1, 1, 1), (3, 96, 32, 5, 1, 2, 1), (32, 48, 64, 5, 1, 2, 1), (4, 84, 32, 8, 4, 0, 1),
           (32, 20, 64, 4, 2, 0, 1), (64, 9, 64, 3, 1, 0, 1), (3, 128, 64, 9, 1, 4, 1), (64, 64, 256, 3, 1, 1, 1)]
    yield from dict.fromkeys(resnet + vgg + cifar + unet + convnext + mobile + old)


def more_nets() -> Iterator[tuple]:
    """Further ones: decoders that read what the encoder made, generators, dense and grouped blocks, detectors."""
    unet = [(c, s, k, 3, 1, 1, 1) for c, s, k in (
        (96, 128, 32), (96, 64, 32), (192, 64, 64), (192, 128, 64), (192, 32, 64), (384, 32, 128), (384, 64, 128),
        (384, 16, 128), (768, 32, 256), (768, 16, 256), (1536, 16, 512), (32, 128, 32), (128, 128, 64), (256, 64, 128),
        (512, 32, 256), (640, 64, 320), (960, 64, 320), (320, 32, 320), (960, 32, 640), (1280, 32, 640),
        (1920, 32, 640), (640, 16, 640), (1920, 16, 1280), (2560, 16, 1280), (1280, 8, 1280), (2560, 8, 1280))]
    unet += [(c, s, k, 2, 2, 0, 1) for c, s, k in ((64, 256, 128), (128, 128, 256), (256, 64, 512), (512, 32, 1024),
                                                   (32, 128, 64), (64, 64, 128), (128, 32, 256))]
    generator = [(512, 4, 100, 4, 1, 0, 1), (1024, 4, 100, 4, 1, 0, 1), (512, 8, 1024, 4, 2, 1, 1),
                 (512, 4, 1, 4, 1, 0, 1), (1024, 4, 1, 4, 1, 0, 1), (1, 64, 64, 4, 2, 1, 1)]
    dense = [(c, s, 128, 1, 1, 0, 1) for s, cs in ((56, (64, 160)), (28, (128, 320)), (14, (256, 640)), (7, (512, 768)))
             for c in cs]
    dense += [(128, s, 32, 3, 1, 1, 1) for s in (56, 28, 14, 7)]
    grouped = [(w, s, w, 3, st, 1, 32) for w, s, st in ((256, 28, 1), (512, 14, 1), (1024, 7, 1), (256, 56, 2))]
    grouped += [(w, s, w, r, st, r // 2, w) for w, s, r, st in (
        (16, 112, 3, 1), (64, 112, 3, 2), (72, 56, 3, 1), (72, 56, 5, 2), (120, 28, 5, 1), (480, 14, 3, 1),
        (672, 14, 5, 1), (672, 14, 5, 2), (960, 7, 5, 1), (1152, 7, 5, 1), (512, 14, 7, 1), (1024, 7, 7, 1))]
    detector = [(3, 640, 32, 3, 2, 1, 1), (32, 320, 64, 3, 2, 1, 1), (64, 160, 64, 3, 1, 1, 1),
                (64, 160, 128, 3, 2, 1, 1), (128, 80, 128, 3, 1, 1, 1), (128, 80, 256, 3, 2, 1, 1),
                (256, 40, 256, 3, 1, 1, 1), (256, 40, 512, 3, 2, 1, 1), (512, 20, 512, 3, 1, 1, 1)]
    yield from dict.fromkeys(unet + generator + dense + grouped + detector)


def lines() -> Iterator[tuple]:
    """One convolution, one size after another changed."""
    base = {"N": 16, "C": 64, "H": 32, "K": 64, "R": 3, "stride": 1}
    bases = ({}, {"C": 128, "K": 128}, {"R": 1}, {"stride": 2}, {"C": 32, "K": 32, "N": 32},
             {"C": 256, "K": 256, "H": 16})
    for other in bases:
        start = base | other
        for key, values in VARIED.items():
            for value in values:
                now = start | {key: value}
                yield now["N"], now["C"], now["H"], now["K"], now["R"], now["stride"], now["R"] // 2, 1


def somewhere(count: int) -> Iterator[tuple]:
    """Random ones, the same in every run."""
    pick = random.Random(0)
    for _ in range(count):
        kernel = pick.choice((1, 1, 3, 3, 3, 3, 4, 5, 7))
        yield (pick.choice((1, 2, 4, 5, 8, 12, 16, 24, 32, 48, 64, 100, 128)),
               pick.choice((1, 3, 4, 8, 16, 24, 32, 48, 64, 64, 96, 128, 128, 192, 256, 256, 320, 512, 640, 1024)),
               pick.choice((7, 8, 14, 16, 20, 28, 32, 40, 56, 64, 64, 96, 112, 128, 160, 224, 256)),
               pick.choice((1, 3, 8, 10, 16, 24, 32, 48, 64, 64, 96, 128, 128, 192, 256, 256, 320, 512, 640, 1024)),
               kernel, pick.choice((1, 1, 1, 2)), pick.choice((0, kernel // 2, kernel // 2)), 1)


def small_nets() -> Iterator[tuple]:
    """Nets for small images, and widths that are no power of two."""
    for width in (48, 96):
        yield from ((3, 32, width, 3, 1, 1, 1), (width, 32, width, 3, 1, 1, 1), (width, 32, 2 * width, 3, 1, 1, 1),
                    (width, 16, 2 * width, 3, 1, 1, 1), (2 * width, 16, 2 * width, 3, 1, 1, 1),
                    (2 * width, 8, 4 * width, 3, 1, 1, 1), (4 * width, 8, 4 * width, 3, 1, 1, 1))
    for width, size in ((48, 128), (96, 64), (192, 32), (384, 16), (48, 96), (96, 48), (192, 24), (384, 12),
                        (24, 128), (40, 64), (80, 32)):
        yield from ((width, size, width, 3, 1, 1, 1), (2 * width, size, width, 3, 1, 1, 1),
                    (width, size // 2, 2 * width, 3, 1, 1, 1), (width, size, 2 * width, 2, 2, 0, 1))
    for net in nets():
        if net[1] <= 32 and net[0] <= 256:
            yield net


def sounds() -> Iterator[tuple]:
    """Convolutions in one dimension: of waves, spectra, texts and sequences of features."""
    yield from ((1, 16000, 64, 9, 2, 4, 1), (64, 8000, 64, 5, 2, 2, 1), (64, 4000, 128, 5, 2, 2, 1),
                (128, 2000, 128, 5, 2, 2, 1), (128, 1000, 256, 5, 2, 2, 1), (1, 16000, 512, 10, 5, 0, 1),
                (512, 3199, 512, 3, 2, 0, 1), (512, 1599, 512, 3, 2, 0, 1), (512, 799, 512, 2, 2, 0, 1),
                (80, 3000, 384, 3, 1, 1, 1), (384, 3000, 384, 3, 2, 1, 1), (80, 3000, 512, 3, 1, 1, 1),
                (512, 3000, 512, 3, 2, 1, 1), (64, 1000, 64, 3, 1, 1, 1), (64, 1000, 64, 7, 1, 3, 1),
                (64, 1000, 64, 1, 1, 0, 1), (32, 1000, 64, 5, 1, 2, 1), (12, 5000, 64, 7, 2, 3, 1),
                (64, 2500, 128, 7, 2, 3, 1), (128, 500, 256, 3, 1, 1, 1), (256, 500, 256, 3, 1, 1, 1),
                (64, 8000, 128, 3, 1, 1, 1), (128, 8000, 128, 3, 1, 1, 1), (300, 128, 100, 3, 1, 1, 1),
                (300, 128, 100, 5, 1, 2, 1), (768, 512, 768, 3, 1, 1, 1), (256, 512, 1024, 1, 1, 0, 1),
                (1024, 512, 256, 1, 1, 0, 1), (256, 500, 256, 31, 1, 15, 256), (512, 500, 512, 31, 1, 15, 512),
                (64, 1000, 64, 3, 1, 1, 64), (128, 4000, 64, 4, 2, 1, 1), (256, 2000, 128, 16, 8, 4, 1),
                (32, 8000, 64, 4, 2, 1, 1), (1, 784, 16, 3, 1, 1, 1), (16, 392, 32, 3, 1, 1, 1),
                (1, 512, 32, 8, 4, 2, 1))


def configurations() -> Iterator[dict]:
    """Every convolution, the likeliest first; none is too large for a card."""
    seen = set()
    plain = ("fp32", False, True)

    def in_one_dimension():
        for N in (16, 32, 8, 64, 4, 128):
            for dtype in ("fp32", "bf16"):
                for net in sounds():
                    yield (N, *net, dtype, False, True)

    def rows():
        for N in (16, 8, 32, 64, 4):
            for net in nets():
                yield (N, *net, *plain)
        for line in lines():
            yield (*line, *plain)
        for line in somewhere(500):
            yield (*line, *plain)
        for N in (16, 32, 8):
            for net in nets():
                yield (N, *net, "bf16", False, True)
        for dtype in ("fp32", "bf16"):
            for net in nets():
                yield (16, *net, dtype, True, True)
        for net in nets():
            yield (16, *net, "fp32", False, False)
        for net in nets():
            yield (16, *net, "fp16", False, True)
        for line in somewhere(500):
            yield (*line, "bf16", False, True)
        for line in lines():
            yield (*line, "bf16", False, True)
        for line in somewhere(200):
            yield (*line, "fp32", True, True)
        for N in (8, 16, 4, 32):
            for dtype in ("fp32", "bf16"):
                for net in more_nets():
                    yield (N, *net, dtype, False, True)
        for N in (8, 32, 64):
            for dtype in ("bf16", "fp32"):
                for net in nets():
                    yield (N, *net, dtype, True, True)
        for net in more_nets():
            yield (16, *net, "bf16", True, True)
        for N in (4, 64):
            for net in nets():
                yield (N, *net, "bf16", False, True)
        for N, dtype in ((128, "fp32"), (24, "fp32"), (48, "fp32"), (128, "bf16"), (12, "fp32"), (24, "bf16")):
            for net in nets():
                yield (N, *net, dtype, False, True)
        for N in (128, 100, 256, 8, 16):
            for dtype in ("fp32", "bf16"):
                for net in small_nets():
                    yield (N, *net, dtype, False, True)
        for net in nets():
            yield (8, *net, "fp32", False, False)

    for row in chain(((*row, 2) for row in rows()), ((*row, 1) for row in in_one_dimension())):
        if row not in seen and small_enough(*row[:8], row[-1]):
            yield dict(zip(SHAPE, row, strict=True))
        seen.add(row)


def small_enough(N, C, H, K, R, stride, pad, groups, dims) -> bool:
    """Whether it is a convolution at all, and no burden for a card."""
    out = (H + 2 * pad - R) // stride + 1
    if out < 1 or N * max(C * H**dims, K * out**dims) > MOST_ELEMENTS:
        return False
    return 2 * N * K * C // groups * (R * out) ** dims <= MOST_OPERATIONS
