"""The ways of getting memory back, as changes of a command line, each with its price: time, and what else it risks.

Times are those of results/measured/h200/07-steps.csv: each change alone, on GPT-2 124M with 8 x 1,024 tokens in fp32.
On another step they differ; they are here to say what is cheap and what is dear. What nobody has timed says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gpt2.memory import gpus
from gpt2.step import Recipe
from gpt2.study import recorded
from gpt2.study.experiments import EXPANDABLE, Experiment

EFFORT = 5.0  # what any change costs, in percent of a step's time: one change of 5 % is worth as much as two of 0 %


@dataclass(frozen=True, eq=False)
class Change:
    """One way of getting memory back.

    Attributes:
        option: what to type.
        recipe, alloc_conf: what it changes.
        time_ratio: a step's time with it, of the time without; None if nobody has timed it.
        slower_percent: what is assumed where nobody has.
        risk: what it costs besides time, for people; "" if nothing.
        risk_percent: what that is worth, in percent of a step's time: a judgement, not a measurement.
    """

    option: str
    recipe: dict = field(default_factory=dict)
    alloc_conf: str = ""
    time_ratio: float | None = None
    slower_percent: float = 0.0
    risk: str = ""
    risk_percent: float = 0.0

    def __call__(self, experiment: Experiment) -> Experiment:
        """The experiment with the change; ValueError if they do not go together."""
        conf = ",".join(filter(None, (experiment.alloc_conf, self.alloc_conf)))
        return replace(experiment, recipe=replace(experiment.recipe, **self.recipe), alloc_conf=conf)

    @property
    def weight(self) -> float:
        """The price as a number, in percent of a step's time. Time that is saved is no reason to change first."""
        slower = self.slower_percent if self.time_ratio is None else max(100 * (self.time_ratio - 1), 0.0)
        return EFFORT + slower + self.risk_percent

    @property
    def price(self) -> str:
        """The price in words."""
        percent = None if self.time_ratio is None else round(100 * (self.time_ratio - 1))
        time = ("not timed" if percent is None else "no more time" if percent == 0 else
                f"{abs(percent)} % {'more' if percent > 0 else 'less'} time")
        return ", ".join(filter(None, (time, self.risk)))


def of(chosen: Sequence[Change]) -> str:
    """The price of changes, in words, and where the times were measured."""
    parts = [change.price if len(chosen) == 1 else f"{change.option}: {change.price}" for change in chosen]
    where = f", measured on {recorded.table('07-steps').attrs['gpu']}{', each alone' if len(chosen) > 1 else ''}"
    return "; ".join(parts) + (where if any(change.time_ratio for change in chosen) else "")


def changes(recipe: Recipe, gpu: gpus.Gpu) -> Iterator[Change]:
    """All of them for a recipe on a card. Of those that change the same thing, what saves most comes last."""
    yield Change(f"--alloc-conf {EXPANDABLE}", alloc_conf=EXPANDABLE, time_ratio=_step("sweep-8-expandable"))
    yield Change("--drop-logits", {"keep_logits": False}, time_ratio=_step("drop-logits"))
    yield Change("--optimizer fused", {"optimizer": "fused"}, time_ratio=_step("fused"))
    yield Change("--attention sdpa", {"attention": "sdpa"}, time_ratio=_step("sdpa"))
    yield Change("--loss chunked", {"loss": "chunked"}, time_ratio=_step("chunked"))
    yield Change("--loss chunked --loss-chunks 64", {"loss": "chunked", "loss_chunks": 64}, time_ratio=_loss(64))
    rounded = "products are rounded to 16 bit"
    if gpu.capability >= (8, 0):
        yield Change("--precision bf16", {"precision": "bf16"}, time_ratio=_step("bf16"), risk=rounded, risk_percent=10)
    else:  # before it, bf16 is emulated
        yield Change("--precision fp16", {"precision": "fp16"}, risk=f"{rounded}, and scaled", risk_percent=15)
    yield Change("--checkpoint mlp", {"checkpoint": "mlp"}, time_ratio=_step("save-mlp"))
    block = _step("checkpoint")
    yield Change("--checkpoint every-3", {"checkpoint": "every-3"}, slower_percent=100 * ((block or 1) - 1) / 3,
                 risk="a third of forward runs again")
    yield Change("--checkpoint every-2", {"checkpoint": "every-2"}, time_ratio=_step("save-every-2"))
    yield Change("--checkpoint attention", {"checkpoint": "attention"}, time_ratio=_step("save-attention"))
    yield Change("--checkpoint block", {"checkpoint": "block"}, time_ratio=block)
    yield Change("--step-in-backward", {"step_in_backward": True}, time_ratio=_step("save-in-backward"),
                 risk="no clipping, no accumulation", risk_percent=15)
    yield from _passes(recipe.batch, recipe.accumulate)
    yield Change("--moments bf16", {"moments": "bf16"}, time_ratio=_step("save-moments"),
                 risk="the second moment may stop decaying: watch the loss", risk_percent=30)


def _passes(batch: int, accumulate: int) -> Iterator[Change]:
    """The same step in more passes of smaller batches: the three largest batches that divide it."""
    two = _step("save-accumulate")
    for k in [k for k in range(2, batch + 1) if batch % k == 0][:3]:
        yield Change(f"--batch {batch // k} --accumulate {accumulate * k}",
                     {"batch": batch // k, "accumulate": accumulate * k}, time_ratio=two if k == 2 else None,
                     slower_percent=100 * ((two or 1) - 1) * math.log2(k), risk=f"the same gradients in {k} passes")


def _step(experiment: str) -> float | None:
    """A step's time with a change, of the time without."""
    try:
        base = recorded.one("07-steps", "step_ms", experiment="sweep-8")
        return recorded.one("07-steps", "step_ms", experiment=experiment) / base
    except (KeyError, FileNotFoundError):  # a study that measured anew, and not this
        return None


def _loss(chunks: int) -> float | None:
    """The same for a loss in chunks, of which only the loss alone was timed: what it takes longer is added."""
    case = {"precision": "fp32", "vocabulary_count": 50_257}
    try:
        base = recorded.one("07-steps", "step_ms", experiment="sweep-8")
        longer = (recorded.one("07-loss", "loss_ms", loss=f"{chunks} chunks", **case)
                  - recorded.one("07-loss", "loss_ms", loss="plain", **case))
    except (KeyError, FileNotFoundError):
        return None
    return 1 + longer / base
