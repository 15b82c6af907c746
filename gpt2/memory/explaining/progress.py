"""How far was the step when it failed? From allocated bytes to the number of blocks whose forward is done.

B batch, T length, D width, H heads, L layers; bytes everywhere, fp32 training with AdamW.

One block keeps, for x = B·T·D·4 and S = B·H·T²·4 bytes:
  16 x + S + T²           LayerNorms 4x, query-key-value 3x, probabilities S, attention output x, MLP hidden 8x, mask
  + 5/4 S + x/2           with dropout: the dropped-out probabilities and a byte per element dropped from
  + 12 x                  with a tanh GELU written out by hand: three more tensors of 4x (reference case 18)
Published check: 769 MiB at 8 x 1,024 for the first line alone.
"""

from __future__ import annotations

from typing import NamedTuple

from gpt2.memory.explaining.candidates import Candidate
from gpt2.model import Size

# (how the model is written, dropout, hand-written GELU), the study's own first, then the usual sources of messages
IMPLEMENTATIONS = (
    ("attention written out, no dropout", False, False),
    ("attention written out, dropout and a hand-written GELU (minGPT; transformers' eager GPT-2)", True, True),
    ("attention written out, dropout, F.gelu", True, False),
    ("attention written out, no dropout, a hand-written GELU", False, True),
)
_CUBLAS_BYTES = 8_519_680
_TIE_BYTES = 64 * 2**20  # buffers and names that implementations keep or do not keep: within this, order decides


class Progress(NamedTuple):
    """`blocks_done` blocks have finished their forward, if the model is written like that and the step is that one."""

    implementation: str
    step: str  # "first" | "later": AdamW's moments exist only after the first
    batch: int
    length: int
    blocks_done: int
    rest_bytes: int  # what the block in progress would hold


def parameter_count(size: Size) -> int:
    """Parameters with the head tied to the embedding: V·D + T·D + L·(12 D² + 13 D) + 2 D."""
    D = size.width
    return (size.vocabulary + size.context) * D + size.layers * (12 * D * D + 13 * D) + 2 * D


def floor_bytes(size: Size, step: str) -> int:
    """What is there before the first block: weights, causal masks, cuBLAS, and AdamW's moments in a later step."""
    parameters = 4 * parameter_count(size)
    return parameters * (3 if step == "later" else 1) + 4 * size.layers * size.context**2 + _CUBLAS_BYTES


def block_bytes(size: Size, batch: int, length: int, dropout: bool = False, written_out_gelu: bool = False) -> int:
    """What one block keeps for backward with attention written out, fp32."""
    x, scores = batch * length * size.width * 4, batch * size.heads * length**2 * 4
    kept = 16 * x + scores + length**2
    if dropout:
        kept += scores * 5 // 4 + x // 2
    return kept + (12 * x if written_out_gelu else 0)


def progress(size: Size, allocated_bytes: int | None, found: list[Candidate]) -> list[Progress]:
    """Every reading under which a request for a score matrix came from a forward that was under way, best first.

    Empty where a score matrix in fp32 is not the likeliest of `found`, or the message gives no allocated
    bytes. The request fixes batch and length; what is left of `allocated_bytes` above the floor is whole blocks and the
    part of one that precedes such a request: LayerNorm, query, key and value, then up to two score matrices.
    """
    if not found or (found[0].kind, found[0].dtype) != ("scores", "float32") or allocated_bytes is None:
        return []
    scores = found[0]
    readings = []
    for order, (name, dropout, written_out) in enumerate(IMPLEMENTATIONS):
        block = block_bytes(size, scores.batch, scores.length, dropout, written_out)
        x = scores.batch * scores.length * size.width * 4
        for step in ("first", "later"):
            above = allocated_bytes - floor_bytes(size, step) - 2 * x
            done, rest = divmod(above, block)
            miss = min(abs(rest - 7 * x - k * scores.bytes) for k in range(3))
            if 0 <= done < size.layers:
                reading = Progress(name, step, scores.batch, scores.length, done, rest)
                readings.append((miss // _TIE_BYTES, order, step, reading))
    return [reading for *_, reading in sorted(readings)]
