"""The savings as data: each alone on the published baseline, and a ladder on which one comes after another.

Every configuration is an experiment at batch 8 and, under the memory that the published A40 had free, a pair at its
boundary: the largest batch that was predicted to fit, and one more. The numbers were predicted without a GPU, and
committed, before any of them ran on one. A batch fits if it survives `gpt2.memory.fit.STEPS` steps: with expandable
segments there are batches that survive two, or five, and no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gpt2.model import Size
from gpt2.step import Recipe
from gpt2.study.sized import SizedRecipe

LIMIT_MIB = 45_440  # what the published A40 had free
EXPANDABLE = "expandable_segments:True"
HALF = {"precision": "bf16", "attention": "sdpa"}


@dataclass(frozen=True, eq=False)
class Saving:
    """One configuration.

    Attributes:
        key: a word for names of experiments and rows.
        says: what it is, for people.
        largest: sequences of a batch that fit under LIMIT_MIB, as predicted, for 20 steps; one more does not.
        options: how the recipe differs from the published baseline.
        alloc_conf: the allocator's settings.
        backend: the implementation of fused attention, where one is forced.
        names: experiments that exist already, by batch.
    """

    key: str
    says: str
    largest: int
    options: dict = field(default_factory=dict)
    alloc_conf: str = ""
    backend: str = ""
    names: dict[int, str] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """Of the comparison: 8 sequences a step."""
        return self.options.get("batch", 8)

    @property
    def name(self) -> str:
        """The experiment with 8 sequences."""
        return self.names.get(self.batch, f"save-{self.key}")

    def at(self, batch: int) -> str:
        """The experiment at another batch, under the limit."""
        return self.names.get(batch, f"save-{self.key}-at-{batch}")

    def recipe(self, batch: int) -> Recipe:
        """Sequences of 1,024 tokens; with accumulation `batch` is that of one micro-batch."""
        return Recipe(**{**self.options, "batch": batch})


def _swept(suffix: str, *batches: int) -> dict[int, str]:
    return {batch: f"sweep-{batch}{suffix}" for batch in batches}


BASE = Saving("base", "as published", 20, names=_swept("", 8, 20, 21))
_EXPANDABLE = _swept("-expandable", 8, 22, 23)

SINGLES = (
    BASE,
    Saving("expandable", "expandable segments", 22, alloc_conf=EXPANDABLE, names=_EXPANDABLE),
    Saving("drop-logits", "del logits", 22, {"keep_logits": False}, names={8: "drop-logits"}),
    Saving("fused", "fused AdamW", 20, {"optimizer": "fused"}, names={8: "fused"}),
    Saving("sdpa", "fused attention", 28, {"attention": "sdpa"}, names={8: "sdpa"}),
    Saving("chunked", "loss in 8 chunks", 32, {"loss": "chunked"}, names={8: "chunked"}),
    Saving("bf16", "bf16 autocast", 22, {"precision": "bf16"}, names={8: "bf16"}),
    Saving("accumulate", "2 micro-batches of half the size", 20, {"accumulate": 2, "batch": 4}),
    Saving("moments", "bf16 moments", 20, {"moments": "bf16"}),
    Saving("in-backward", "step in backward", 20, {"step_in_backward": True}),
    Saving("mlp", "checkpoint the MLPs", 23, {"checkpoint": "mlp"}),
    Saving("attention", "checkpoint the attentions", 32, {"checkpoint": "attention"}),
    Saving("every-2", "checkpoint every 2nd block", 27, {"checkpoint": "every-2"}),
    Saving("block", "checkpoint every block", 44, {"checkpoint": "block"}, names={8: "checkpoint"}),
)

BACKENDS = (
    Saving("cudnn", "bf16, fused attention: cuDNN", 39, HALF, names={8: "bf16-sdpa"}),
    Saving("flash", "bf16, fused attention: flash", 39, HALF, backend="flash"),
    Saving("efficient", "bf16, fused attention: memory-efficient", 39, HALF, backend="efficient"),
    Saving("math", "bf16, fused attention: plain operators", 25, HALF, backend="math"),
)

_STEPS = (
    ("+ expandable segments", 22, {}),
    ("+ del logits", 24, {"keep_logits": False}),
    ("+ fused attention", 37, {"attention": "sdpa"}),
    ("+ bf16 autocast", 53, {"precision": "bf16"}),
    ("+ loss in 8 chunks", 108, {"loss": "chunked"}),
    ("+ checkpoint every 2nd block", 169, {"checkpoint": "every-2"}),
    ("+ checkpoint every block", 391, {"checkpoint": "block"}),
    ("+ loss in 64 chunks", 603, {"loss_chunks": 64}),
    ("+ fused AdamW", 603, {"optimizer": "fused"}),
    ("+ step in backward", 603, {"step_in_backward": True}),
    ("+ bf16 moments", 610, {"moments": "bf16"}),
)


def _rungs() -> Iterator[Saving]:
    """Each rung has all that the ones before it have."""
    yield BASE
    options: dict = {}
    for number, (says, largest, more) in enumerate(_STEPS, start=1):
        options = {**options, **more}
        yield Saving(f"ladder-{number}", says, largest, options, EXPANDABLE, names={} if options else _EXPANDABLE)


LADDER = tuple(_rungs())
SAVINGS = (*SINGLES, *BACKENDS, *LADDER[1:])

# Batches beyond the boundary that were run as well, when two steps were still thought to be enough.
BEYOND = {"ladder-2": (25, 26), "ladder-6": (170, 171), "ladder-8": (605, 606), "ladder-9": (605, 606),
          "ladder-10": (606,), "ladder-11": (612,), "math": (27, 28)}

# The longest sequence of a batch of one: the context grows with it, in steps of 256 tokens.
LENGTH_STEP = 256
LENGTHS = {"base": 6_912, "sdpa": 29_184, "cudnn": 40_192, "ladder-5": 108_032}
_TRACED = {"bf16", "sdpa", "block", "chunked", "cudnn", "ladder-5"}  # pairs worth a trace


def of_length(saving: Saving, length: int) -> SizedRecipe:
    """One sequence, of a GPT-2 124M whose context is as long."""
    return SizedRecipe(**{**saving.options, "batch": 1, "length": length}, custom=Size(context=length))


def experiments() -> Iterator[dict]:
    """Fields of each Experiment that no other list has. Tagged "savings": to be recorded; "savings-run": to be run."""
    for saving in SAVINGS:
        settings = {"alloc_conf": saving.alloc_conf, "backend": saving.backend, "limit_mib": LIMIT_MIB}
        if saving.batch not in saving.names:
            yield settings | {"name": saving.name, "recipe": saving.recipe(saving.batch), "tags": ("savings",)}
        tags = ("savings",) if saving.key in _TRACED else ("savings-run",)
        for batch in (saving.largest, saving.largest + 1):
            if batch not in saving.names:
                yield settings | {"name": saving.at(batch), "recipe": saving.recipe(batch), "tags": tags, "steps": 2}
    for saving in SAVINGS:
        if saving.key in LENGTHS:
            for length in (LENGTHS[saving.key], LENGTHS[saving.key] + LENGTH_STEP):
                yield {"name": f"save-{saving.key}-length-{length}", "recipe": of_length(saving, length),
                       "limit_mib": LIMIT_MIB, "alloc_conf": saving.alloc_conf, "backend": saving.backend,
                       "tags": ("savings",), "steps": 2}


def by_key(key: str) -> Saving:
    """The saving called `key`; ValueError lists the known ones."""
    for saving in SAVINGS:
        if saving.key == key:
            return saving
    raise ValueError(f"unknown saving {key!r}; known: {', '.join(saving.key for saving in SAVINGS)}")
