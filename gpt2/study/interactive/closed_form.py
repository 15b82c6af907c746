"""The calculator's arithmetic: peak memory of any setting as a sum of formulas, without a tensor in sight.

A setting has several moments that may hold the peak; each is a list of terms, and a term is a formula in the letters
of `gpt2.memory.formulas`. The text of the formulas is all that the exported page needs: it evaluates the same text.

Exact in kind for fp32 with explicit attention, where the terms are those of `formulas.peak`. For 16 bits, fused
attention, checkpoints and chunked losses the terms say which tensors PyTorch keeps; what kernels take on the side is
left out. The simulator is exact in all of them, and the calculator shows the difference.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from gpt2.memory import formulas
from gpt2.memory.trace import Category

PARAMETERS = "V·D + C·D + L·(12·D² + 13·D) + 2·D"
CHUNKS = 8  # of a chunked loss, as in Recipe
_A, _G, _L, _T = Category.ACTIVATIONS, Category.GRADIENTS, Category.LOSS, Category.TEMPORARIES
PLAIN = ("fp32", "explicit", "none", "full")  # the setting of the published runs


class Term(NamedTuple):
    """Bytes of one owner: a formula of elements, times the bytes of one."""

    category: Category
    bytes_each: int
    formula: str


_SLACK = Term(Category.SLACK, 1, str(formulas.PUBLISHED_SLACK_BYTES))


@dataclass(frozen=True)
class Setting:
    """What the calculator's knobs say."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50_257
    context: int = 1024
    batch: int = 8
    length: int = 1024
    precision: str = "fp32"
    attention: str = "explicit"
    checkpoint: str = "none"
    loss: str = "full"
    optimizer: str = "foreach"

    def letters(self, workspace_bytes: int = formulas.CUBLAS_WORKSPACE_BYTES) -> dict[str, int]:
        """The values of the formulas' letters."""
        values = {"L": self.layers, "D": self.width, "H": self.heads, "V": self.vocabulary, "C": self.context,
                  "B": self.batch, "T": self.length, "K": CHUNKS, "W": workspace_bytes}
        return values | {"P": evaluate(PARAMETERS, values)}


def evaluate(formula: str, letters: dict[str, int]) -> int:
    """The value of a formula: `L·B·H·T²` with the letters given."""
    return eval(_compiled(formula), {"__builtins__": {}}, letters)  # our own text, never a reader's


def moments(setting: Setting) -> dict[str, list[Term]]:
    """What is alive at each moment that may be the peak."""
    fixed, kept = _fixed(setting), _kept(setting)
    plain = (setting.precision, setting.attention, setting.checkpoint, setting.loss) == PLAIN
    return {
        "loss": [*_of(formulas.peak(setting, 1, 1)), _SLACK] if plain else fixed + kept + _loss(setting),
        "backward of the last block": fixed + kept + _recomputed(setting) + _block_backward(setting),
        "backward of the first block": fixed + _block(setting) + _block_backward(setting) + [Term(_G, 4, "P - V·D")],
        "optimizer": fixed + [Term(_G, 4, "P")] + ([Term(_T, 4, "P")] if setting.optimizer == "foreach" else []),
    }


def peak(setting: Setting, workspace_bytes: int = formulas.CUBLAS_WORKSPACE_BYTES) -> tuple[str, dict[Category, int]]:
    """The moment with the most bytes, and its owners."""
    letters = setting.letters(workspace_bytes)
    totals = {name: _owners(terms, letters) for name, terms in moments(setting).items()}
    name = max(totals, key=lambda moment: sum(totals[moment].values()))
    return name, totals[name]


def largest_batch(setting: Setting, capacity_bytes: int,
                  workspace_bytes: int = formulas.CUBLAS_WORKSPACE_BYTES) -> int:
    """The largest batch whose estimated reserved memory stays within the card; 0 if not even 1 does."""
    def fits(batch: int) -> bool:
        _, owners = peak(_with_batch(setting, batch), workspace_bytes)
        return formulas.reserved_estimate(sum(owners.values())) <= capacity_bytes

    low, high = 0, 1
    while high < 2**16 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _with_batch(setting: Setting, batch: int) -> Setting:
    return Setting(**{**setting.__dict__, "batch": batch})


def _owners(terms: list[Term], letters: dict[str, int]) -> dict[Category, int]:
    sums: dict[Category, int] = defaultdict(int)
    for category, bytes_each, formula in terms:
        sums[category] += bytes_each * evaluate(formula, letters)
    return {category: sums[category] for category in Category if category in sums}


@lru_cache(maxsize=512)
def _compiled(formula: str):
    return compile(formula.replace("·", "*").replace("²", "**2").replace("/", "//"), "<formula>", "eval")


# --- the terms ------------------------------------------------------------------------------------------------------


def _of(entries: list[formulas.Entry]) -> list[Term]:
    return [Term(entry.category, entry.bytes_each, entry.formula) for entry in entries]


def _fixed(setting: Setting) -> list[Term]:
    """Between two steps, and the allocator's slack as published. Fused attention has no masks."""
    terms = [*_of(formulas.fixed(setting, 1, 1)), _SLACK]
    return terms if setting.attention == "explicit" else [term for term in terms if term.formula != "L·C²"]


def _block(setting: Setting) -> list[Term]:
    """What one block keeps."""
    half = setting.precision != "fp32"
    if not half and setting.attention == "explicit":
        return _of(formulas.block_saved(setting, 1, 1))
    number = 2 if half else 4
    norms = [Term(_A, 4, "2·B·T·D"), Term(_A, number, "2·B·T·D"), Term(_A, 4, "4·B·T")]
    attention = [Term(_A, number, "4·B·T·D"), Term(_A, 4, "B·H·T")]
    if setting.attention == "explicit":  # softmax runs in fp32, and the product with v wants it in 16 bits again
        attention = [Term(_A, number, "4·B·T·D"), Term(_A, 1, "T²"), Term(_A, 4, "B·H·T²"), Term(_A, 2, "B·H·T²")]
    return norms + attention + [Term(_A, number, "8·B·T·D")]


def _kept(setting: Setting) -> list[Term]:
    """What forward keeps, the loss apart: blocks or their inputs, the two ends, weights cast by autocast."""
    half = setting.precision != "fp32"
    block = [Term(_A, 4, "B·T·D")] if setting.checkpoint == "block" else _block(setting)
    ends = _of(formulas.ends_saved(setting, 1, 1)) if not half else [Term(_A, 4, "B·T·D"), Term(_A, 2, "B·T·D")]
    cast = [Term(_A, 2, "V·D")] if setting.loss == "full" else []
    cast += [Term(_A, 2, "12·L·D²")] if setting.checkpoint == "none" or setting.loss == "chunked" else []
    return [term._replace(formula=f"L·{term.formula}") for term in block] + ends + (cast if half else [])


def _loss(setting: Setting) -> list[Term]:
    """What the loss holds at its worst: four times the vocabulary, or three times a chunk of it and two gradients."""
    half = setting.precision != "fp32"
    if setting.loss == "chunked":
        chunk = [Term(_L, 2, "B·T·V/K + V·D"), Term(_L, 4, "2·B·T·V/K")] if half else [Term(_L, 4, "3·B·T·V/K")]
        return chunk + [Term(_A, 4, "B·T·D"), Term(_G, 4, "V·D"), Term(_T, 4, "2·B·T·D")]
    if half:  # logits and log-probabilities in 16 bits; the latter again, and their gradient, in fp32
        return [Term(_L, 2, "2·B·T·V"), Term(_L, 4, "2·B·T·V")]
    return _of(formulas.vocabulary_sized(setting, 1, 1))


def _recomputed(setting: Setting) -> list[Term]:
    """What backward makes again for a checkpointed block."""
    return _block(setting) if setting.checkpoint == "block" else []


def _block_backward(setting: Setting) -> list[Term]:
    """Beside what is kept, while backward is in the last block's attention: the head's gradient, the named logits."""
    half = setting.precision != "fp32"
    number = 2 if half else 4
    logits = [Term(_L, number, "B·T·V")] if setting.loss == "full" else []
    scores = [Term(_T, 4, "2·B·H·T²")] if setting.attention == "explicit" else []
    return logits + scores + [Term(_G, 4, "V·D"), Term(_T, 4, "2·B·T·D")]
