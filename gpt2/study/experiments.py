"""What is run: one experiment is one process's worth of training, on whichever card it is given.

`predict` gives it a simulated card, `record` the real one; the code in between is the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field

import torch

from gpt2.memory import gpus
from gpt2.memory.trace import Trace
from gpt2.step import Recipe, Training, unwatched
from gpt2.study import hooks, variants
from gpt2.study.backends import attention_backend
from gpt2.study.others import newcomers, subjects
from gpt2.study.others.strangers import STRANGERS
from gpt2.study.savings import ladder

MiB = 2**20
A40_FREE_MIB = 45_440  # what the published A40 had free


@dataclass(frozen=True)
class Experiment:
    """A recipe of ours or a subject that is not, under a limit and allocator settings."""

    name: str
    recipe: Recipe | None = None
    subject: str = ""
    batch: int = 0
    precision: str = "fp32"
    optimizer: str = "AdamW"
    lengths: tuple[int, ...] = ()  # a length per step instead of the recipe's
    steps: int = 3
    limit_mib: int | None = None
    alloc_conf: str = ""
    backend: str = ""  # the only one that fused attention may use; "" is PyTorch's choice
    variant: str = ""  # whose code the model runs, see `variants`
    readings: bool = False  # hooks read the counter around every block of step 2, see `hooks`
    instrumented: bool = True  # phases announced, operators labelled; if not, there is the allocator's history alone
    tags: tuple[str, ...] = field(default=())

    @property
    def limit_bytes(self) -> int | None:
        return self.limit_mib * MiB if self.limit_mib else None

    def run(self, card) -> None:
        """Train on `card`, a Recorder or a SimulatedGpu that has been entered. May raise torch.OutOfMemoryError."""
        if self.recipe is None:
            subjects.train(
                ALL_SUBJECTS[self.subject],
                watch=card.watch,
                batch=self.batch,
                steps=self.steps,
                precision=self.precision,
                optimizer=self.optimizer,
            )
            return
        torch.backends.cuda.matmul.allow_tf32 = False
        training = Training(self.recipe, watch=card.watch if self.instrumented else unwatched)
        variants.apply(self.variant, training.model)
        for step in range(1, self.steps + 1):
            if self.lengths:
                training.set_length(self.lengths[step - 1])
            with hooks.readings(training.model, card, step) if self.readings and step == 2 else nullcontext():
                training.step(step)
        if not self.instrumented:
            card.mark("end", self.steps)

    def about(self) -> dict:
        """What a trace's meta says of the experiment."""
        meta: dict = {"experiment": self.name, "steps": self.steps}
        if self.recipe is not None:
            meta |= {
                "recipe": asdict(self.recipe),
                "vocabulary": self.recipe.size.vocabulary,
                "tokens": self.recipe.tokens,
            }
        else:
            meta |= {
                "subject": self.subject,
                "batch": self.batch,
                "precision": self.precision,
                "optimizer": self.optimizer,
            }
        return meta


def predict(
    experiment: Experiment, gpu: str | gpus.Gpu, *, torch_release: str | None = None, stacks: bool = False
) -> Trace:
    """The experiment on a simulated card. An out-of-memory error ends it and is in meta["out_of_memory"]."""
    from gpt2.memory.simulator import SimulatedGpu

    card = SimulatedGpu(
        gpu,
        torch=torch_release,
        limit_bytes=experiment.limit_bytes,
        allocator_conf=experiment.alloc_conf,
        stacks=stacks,
    )
    return _on(card, experiment)


def record(experiment: Experiment, *, operators: bool = True, stacks: bool = False) -> Trace:
    """The experiment on this machine's GPU; wants a fresh process, as allocator settings are read once."""
    from gpt2.memory.recorder import Recorder

    if experiment.alloc_conf and os.environ.get("PYTORCH_CUDA_ALLOC_CONF") != experiment.alloc_conf:
        raise RuntimeError("set PYTORCH_CUDA_ALLOC_CONF to the experiment's alloc_conf before the process starts")
    card = Recorder(
        limit_bytes=experiment.limit_bytes, operators=operators, stacks=stacks, allocator_conf=experiment.alloc_conf
    )
    return _on(card, experiment)


def _on(card, experiment: Experiment) -> Trace:
    try:
        with card, attention_backend(experiment.backend):
            experiment.run(card)
    except torch.OutOfMemoryError:
        pass  # an answer, not an accident: card.out_of_memory has it
    return card.trace(**experiment.about())


def _recipe(
    name: str, *, steps: int = 3, limit_mib: int | None = None, alloc_conf: str = "", tags=(), **options
) -> Experiment:
    return Experiment(
        name, Recipe(**options), steps=steps, limit_mib=limit_mib, alloc_conf=alloc_conf, tags=tuple(tags)
    )


ALL_SUBJECTS = {**subjects.SUBJECTS, **STRANGERS, **newcomers.NEWCOMERS}
SWEEP = (4, 8, 12, 16, 18, 19, 20, 21, 22, 23)
EXPANDABLE = "expandable_segments:True"
VARIABLE = (512, 640, 768, 1024, 384, 896, 1000, 256, 700, 1024)


def _all() -> Iterable[Experiment]:
    for batch in SWEEP:
        yield _recipe(f"sweep-{batch}", batch=batch, limit_mib=A40_FREE_MIB, tags=("sweep",))
        yield _recipe(
            f"sweep-{batch}-expandable", batch=batch, limit_mib=A40_FREE_MIB, alloc_conf=EXPANDABLE, tags=("sweep",)
        )
    yield _recipe("base", tags=("exact",))
    yield Experiment("plain", Recipe(), instrumented=False, tags=("exact",))
    yield Experiment("readings", Recipe(), readings=True, tags=("exact",))
    for length in (256, 512):
        yield _recipe(f"length-{length}", length=length, tags=("exact",))
    yield _recipe("batch-1", batch=1, tags=("exact",))
    common = {
        "bf16": {"precision": "bf16"},
        "fp16": {"precision": "fp16"},
        "sdpa": {"attention": "sdpa"},
        "bf16-sdpa": {"precision": "bf16", "attention": "sdpa"},
        "fp16-sdpa": {"precision": "fp16", "attention": "sdpa"},
        "checkpoint": {"checkpoint": "block"},
        "bf16-checkpoint": {"precision": "bf16", "checkpoint": "block"},
        "bf16-sdpa-checkpoint": {"precision": "bf16", "attention": "sdpa", "checkpoint": "block"},
        "fused": {"optimizer": "fused"},
        "loop": {"optimizer": "loop"},
        "clip": {"clip": 1.0},
        "accumulate": {"accumulate": 3, "batch": 4},
        "chunked": {"loss": "chunked"},
        "bf16-sdpa-chunked": {"precision": "bf16", "attention": "sdpa", "loss": "chunked"},
        "everything": {
            "precision": "bf16",
            "attention": "sdpa",
            "checkpoint": "block",
            "loss": "chunked",
            "optimizer": "fused",
            "clip": 1.0,
        },
        "dropout": {"dropout": 0.1},
        "bf16-sdpa-dropout": {"precision": "bf16", "attention": "sdpa", "dropout": 0.1},
        "drop-logits": {"keep_logits": False},
        "zeros": {"set_to_none": False},
        "fp16-clip": {"precision": "fp16", "clip": 1.0, "accumulate": 2},
        "bf16-sdpa-b32": {"precision": "bf16", "attention": "sdpa", "batch": 32},
        "bf16-fused-accumulate": {"precision": "bf16", "optimizer": "fused", "accumulate": 2, "clip": 1.0},
    }
    for name, options in common.items():
        yield _recipe(name, tags=("exact",), **options)
    for name, conf in (("bf16-sdpa", EXPANDABLE), ("checkpoint", EXPANDABLE), ("bf16", EXPANDABLE)):
        yield _recipe(f"{name}-expandable", alloc_conf=conf, tags=("exact",), **common[name])
    yield _recipe("350M", model="350M", batch=4, tags=("exact",))
    yield _recipe("350M-bf16-sdpa", model="350M", batch=4, precision="bf16", attention="sdpa", tags=("exact",))
    yield _recipe(
        "774M-bf16-sdpa", model="774M", batch=4, precision="bf16", attention="sdpa", optimizer="fused", tags=("exact",)
    )
    yield _recipe(
        "1.3B-8",
        model="1.3B",
        batch=8,
        length=2048,
        precision="bf16",
        attention="sdpa",
        optimizer="fused",
        tags=("exact",),
    )
    yield _recipe(
        "1.3B-16",
        model="1.3B",
        batch=16,
        length=2048,
        precision="bf16",
        attention="sdpa",
        optimizer="fused",
        tags=("exact",),
    )
    yield _recipe("1.3B-2048-explicit", model="1.3B", batch=2, length=2048, precision="bf16", tags=("exact",))
    yield _recipe("split-128", alloc_conf="max_split_size_mb:128", tags=("exact",))
    yield _recipe("power2", alloc_conf="roundup_power2_divisions:8", precision="bf16", tags=("exact",))
    yield _recipe(
        "gc", alloc_conf="garbage_collection_threshold:0.6", batch=20, limit_mib=A40_FREE_MIB, tags=("exact",)
    )
    for name, conf in (("native", ""), ("expandable", EXPANDABLE)):
        yield Experiment(
            f"variable-{name}",
            Recipe(precision="bf16", attention="sdpa"),
            lengths=VARIABLE,
            steps=len(VARIABLE),
            alloc_conf=conf,
            tags=("variable",),
        )
    for name, batch, precision in (
        ("hf-gpt2", 4, "fp32"),
        ("hf-gpt2", 4, "bf16"),
        ("hf-llama", 4, "bf16"),
        ("hf-llama", 4, "fp32"),
        ("hf-bert", 8, "fp32"),
        ("hf-bert", 8, "bf16"),
        ("hf-vit", 16, "fp32"),
        ("hf-vit", 16, "bf16"),
        ("resnet18", 32, "fp32"),
        ("resnet18", 32, "bf16"),
        ("small-cnn", 64, "fp32"),
        ("mlp", 512, "fp32"),
        ("torch-transformer", 16, "fp32"),
        ("torch-transformer", 16, "bf16"),
        ("lstm", 16, "fp32"),
    ):
        yield Experiment(f"{name}-{precision}", subject=name, batch=batch, precision=precision, tags=("other",))
    for name in STRANGERS:
        for precision in ("fp32", "bf16"):
            yield Experiment(f"{name}-{precision}", subject=name, batch=8, precision=precision, tags=("stranger",))
    for name, batch, precision in newcomers.runs():
        yield Experiment(f"{name}-{precision}", subject=name, batch=batch, precision=precision, tags=("newcomer",))
    yield Experiment("resnet18-sgd", subject="resnet18", batch=32, optimizer="SGD", tags=("other",))
    yield Experiment("mlp-adam", subject="mlp", batch=512, optimizer="Adam", tags=("other",))
    yield from (Experiment(**fields) for fields in ladder.experiments())


EXPERIMENTS = {e.name: e for e in _all()}
