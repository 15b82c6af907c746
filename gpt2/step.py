"""One training step as a sequence of named moments, and the recipe that says how it is made.

Ordinary PyTorch: it talks to `torch.cuda` and does not know whether a driver or a simulation answers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace

import torch

from gpt2.model import CHECKPOINTS, GPT2, SIZES, Size, checkpoint_every, size
from gpt2.savings import AdamWSmallMoments, StepInBackward, check_liger

__all__ = ["ATTENTIONS", "CHECKPOINTS", "LOSSES", "MOMENTS", "OPTIMIZERS", "PHASES", "PRECISIONS", "Recipe", "Training",
           "Watch", "unwatched"]

PRECISIONS = ("fp32", "bf16", "fp16")
ATTENTIONS = ("explicit", "sdpa")
LOSSES = ("full", "chunked", "liger")  # the last where liger-kernel is installed
OPTIMIZERS = ("foreach", "fused", "loop")
MOMENTS = ("fp32", "bf16")
PHASES = ("warmup", "model", "optimizer init", "batch", "forward", "backward", "del logits", "clip", "optimizer",
          "zero_grad")

Watch = Callable[[str, int], AbstractContextManager]
"""Called as `watch(phase, step)` around every line of the step; steps count from 1; 0 is before the first."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a step does. The defaults are the published baseline."""

    model: str = "124M"
    batch: int = 8
    length: int = 1024
    precision: str = "fp32"
    attention: str = "explicit"
    checkpoint: str = "none"
    loss: str = "full"
    optimizer: str = "foreach"
    accumulate: int = 1
    clip: float = 0.0
    dropout: float = 0.0
    loss_chunks: int = 8
    keep_logits: bool = True  # the name `logits` lives until backward is over
    set_to_none: bool = True
    moments: str = "fp32"
    step_in_backward: bool = False

    def __post_init__(self):
        allowed = {"model": tuple(SIZES), "precision": PRECISIONS, "attention": ATTENTIONS, "loss": LOSSES,
                   "optimizer": OPTIMIZERS, "moments": MOMENTS}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of: {', '.join(values)}")
        for name in ("batch", "length", "accumulate", "loss_chunks"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value}")
        checkpoint_every(self.checkpoint)
        if self.loss == "liger":
            check_liger()
        if self.length > self.size.context:
            raise ValueError(f"length {self.length} is above the context of {self.model}, {self.size.context}")
        if self.clip < 0:
            raise ValueError(f"clip must be at least 0, not {self.clip:g}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout:g}")
        if self.step_in_backward and (self.clip or self.accumulate > 1 or self.precision == "fp16"):
            raise ValueError("step_in_backward needs each gradient final at once: no clip, accumulate or fp16 with it")

    @property
    def size(self) -> Size:
        return size(self.model)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch * self.length

    def describe(self) -> str:
        """The recipe in a line, for captions: only what differs from the default is spelt after the basics."""
        basics = f"GPT-2 {self.model}, batch {self.batch} x {self.length:,}, {self.precision}, AdamW {self.optimizer}"
        said = ("model", "batch", "length", "precision", "optimizer")
        rest = [f"{f.name} {getattr(self, f.name)}" for f in fields(self)
                if f.name not in said and getattr(self, f.name) != f.default]
        return ", ".join([basics, *rest])


def unwatched(phase: str, step: int) -> AbstractContextManager:
    """Nobody looks."""
    return nullcontext()


class Training:
    """A model, its optimizer and its data on `device`, set up line by line under `watch`, and then stepped.

    Setting up a Training runs: a warm-up matmul, the model's move to the device, the optimizer's creation.
    """

    def __init__(self, recipe: Recipe, *, device: str = "cuda", watch: Watch = unwatched, seed: int = 0):
        self.recipe, self.device, self.watch = recipe, device, watch
        torch.manual_seed(seed)
        with watch("warmup", 0):
            warm = torch.randn(64, 64, device=device)
            warm @ warm
            del warm
        model = GPT2(recipe.size, attention=recipe.attention, dropout=recipe.dropout, checkpoint=recipe.checkpoint,
                     loss_chunks=recipe.loss_chunks if recipe.loss == "chunked" else 0, liger=recipe.loss == "liger")
        with watch("model", 0):
            self.model = model.to(device)
        with watch("optimizer init", 0):
            self.optimizer = self._optimizer()
            self.scaler = torch.amp.GradScaler("cuda", enabled=recipe.precision == "fp16")
        with watch("batch", 0):
            self.tokens = self._tokens()

    def _optimizer(self) -> torch.optim.Optimizer | StepInBackward:
        """What the recipe asks for, on the model's parameters."""
        recipe, adamw = self.recipe, torch.optim.AdamW if self.recipe.moments == "fp32" else AdamWSmallMoments
        options = {"lr": 3e-4, "foreach": recipe.optimizer == "foreach", "fused": recipe.optimizer == "fused"}
        if recipe.step_in_backward:
            return StepInBackward(self.model.parameters(), lambda parameters: adamw(parameters, **options))
        return adamw(self.model.parameters(), **options)

    def set_length(self, length: int) -> None:
        """New data of another length, for steps whose lengths vary; at most the model's context."""
        self.recipe = replace(self.recipe, length=length)
        with self.watch("batch", 0):
            self.tokens = self._tokens()

    def _tokens(self) -> torch.Tensor:
        recipe = self.recipe
        return torch.randint(0, recipe.size.vocabulary, (recipe.batch, recipe.length + 1)).to(self.device)

    def step(self, number: int) -> torch.Tensor:
        """Training step `number`, counted from 1; returns the detached loss of its last micro-batch."""
        recipe, watch = self.recipe, self.watch
        torch.cuda.reset_peak_memory_stats() if self.device.startswith("cuda") else None
        for _ in range(recipe.accumulate):
            inputs, targets = self.tokens[:, :-1], self.tokens[:, 1:]
            with watch("forward", number):
                with self._autocast():
                    logits, loss = self.model(inputs, targets)
            if not recipe.keep_logits:
                with watch("del logits", number):
                    del logits
            with watch("backward", number):
                self.scaler.scale(loss / recipe.accumulate if recipe.accumulate > 1 else loss).backward()
            if recipe.keep_logits:
                with watch("del logits", number):
                    del logits
        if recipe.clip:
            with watch("clip", number):
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        with watch("optimizer", number):
            self.scaler.step(self.optimizer)
            self.scaler.update()
        with watch("zero_grad", number):
            self.optimizer.zero_grad(set_to_none=recipe.set_to_none)
        return loss.detach()

    def _autocast(self) -> AbstractContextManager:
        if self.recipe.precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.recipe.precision == "bf16" else torch.float16
        return torch.autocast(self.device.partition(":")[0], dtype=dtype)
