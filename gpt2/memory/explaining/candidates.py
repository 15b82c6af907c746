"""Which tensor of a GPT-2 is that? From the size a message prints to every tensor it may be about.

Shape suffixes: B batch, T length, D width, H heads, V vocabulary, L layers.

A message prints the size of the *segment* it could not get, in two decimals, and not the tensor's: a tensor is a
candidate if its segment is spelt exactly as the message spells it. Segment sizes: `allocator.segment_size`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpt2.memory.allocator import round_size, segment_size
from gpt2.memory.caching.out_of_memory import format_size
from gpt2.model import Size

MiB = 2**20
BATCHES = range(1, 1025)
LIKELY_BATCH = 64  # above it a match is more often chance than somebody's batch
OTHER_LENGTHS = (128, 256, 512, 768, 2048, 4096)  # tried only where the model's own length explains nothing
WIDTHS = (("float32", 4), ("bfloat16 or float16", 2))


class Candidate(NamedTuple):
    """One tensor whose segment has the size that the message prints. `batch` is 0 for what does not depend on it."""

    tensor: str
    kind: str  # "loss" | "scores" | "activation" | "parameter"
    formula: str
    dtype: str
    batch: int
    length: int
    vocabulary: int
    bytes: int

    @property
    def label(self) -> str:
        """One line for people."""
        at = f" at B={self.batch}, T={self.length:,}" if self.batch else ""
        vocabulary = f", V={self.vocabulary:,}" if "V" in self.formula else ""
        return f"{self.tensor}: {self.formula} = {self.bytes:,} B, {self.dtype}{at}{vocabulary}"


def segment_of(size: int) -> int:
    """Bytes of the segment that a tensor of `size` bytes needs where no free block serves it."""
    return segment_size(round_size(size))


def request_range(segment_bytes: int) -> str:
    """Which requests a printed segment size stands for, in words."""
    if segment_bytes <= 2 * MiB:
        return "any request up to 1 MiB: the small pool takes 2.00 MiB from the driver at a time"
    if segment_bytes == 20 * MiB:
        return ("any request above 1 MiB and below 10 MiB (they share segments of 20.00 MiB), "
                "or one above 18 MiB and up to 20 MiB")
    size = format_size(segment_bytes)
    if segment_bytes > 1024 * MiB:
        return f"a request of {size} to two decimals, or up to 2 MiB less: segments are multiples of 2 MiB"
    return f"a request above {format_size(segment_bytes - 2 * MiB)} and up to {size}"


def candidates(requested: str, size: Size, *, batch: int | None = None, length: int | None = None,
               vocabularies: Iterable[int] = ()) -> list[Candidate]:
    """Every tensor of a model of this `size` that `requested` ("394.00 MiB") may be about, likeliest first.

    `batch` and `length` in sequences and tokens, where known. Without a length the model's context is tried, and only
    where that explains nothing with a batch people use, a few others.
    """
    batches = BATCHES if batch is None else (batch,)
    vocabularies = tuple(vocabularies) or (size.vocabulary, -(-size.vocabulary // 64) * 64)
    found = []
    for tried in ((size.context,), OTHER_LENGTHS) if length is None else ((length,),):
        found += [c for T in tried for c in _tensors(size, batches, T, vocabularies)
                  if format_size(segment_of(c.bytes)) == requested]
        if any(c.batch <= LIKELY_BATCH for c in found):
            break
    return sorted(dict.fromkeys(found), key=_unlikeliness)


def _unlikeliness(c: Candidate) -> tuple:
    odd = c.batch & (c.batch - 1) != 0
    return c.batch > LIKELY_BATCH, odd, c.kind == "parameter", c.dtype == "bool", c.batch


def _tensors(size: Size, batches: Iterable[int], T: int, vocabularies: tuple[int, ...]) -> Iterator[Candidate]:
    D, H = size.width, size.heads
    for dtype, e in WIDTHS:
        for B in batches:
            for V in vocabularies:
                yield Candidate("logits, log-probabilities or a gradient of them", "loss", "B·T·V",
                                dtype, B, T, V, B * T * V * e)
            for tensor, kind, formula, numel in (
                ("one attention score matrix (or probabilities, or a gradient)", "scores", "B·H·T²", B * H * T * T),
                ("MLP hidden layer (before or after GELU, or a gradient)", "activation", "B·T·4D", B * T * 4 * D),
                ("query, key and value together", "activation", "B·T·3D", B * T * 3 * D),
                ("hidden state (residual, LayerNorm or attention output)", "activation", "B·T·D", B * T * D),
            ):
                yield Candidate(tensor, kind, formula, dtype, B, T, 0, numel * e)
        yield from _weights(size, dtype, e, vocabularies)
    for B in batches:
        yield Candidate("dropout mask of the attention", "scores", "B·H·T²", "bool", B, T, 0, B * H * T * T)


def _weights(size: Size, dtype: str, e: int, vocabularies: tuple[int, ...]) -> Iterator[Candidate]:
    D = size.width
    for V in vocabularies:
        yield Candidate("token embedding, its gradient or a moment of it", "parameter", "V·D",
                        dtype, 0, 0, V, V * D * e)
    for name, formula, numel in (("MLP weight", "4D·D", 4 * D * D), ("attention weight", "3D·D", 3 * D * D),
                                 ("projection weight", "D·D", D * D), ("position embedding", "T·D", size.context * D),
                                 ("LayerNorm weight or a bias", "D", D)):
        yield Candidate(f"{name}, its gradient or a moment of it", "parameter", formula, dtype, 0, 0, 0, numel * e)
