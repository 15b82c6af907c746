"""The first article's five bugs: what each says or does not say, and what it costs in bytes."""

from __future__ import annotations

import math
from functools import lru_cache

import pandas as pd
import torch
from torch import nn

from gpt2.memory.caching.out_of_memory import format_size
from gpt2.memory.keeping.keepers import Keepers, at_event, first_run
from gpt2.memory.simulator import SimulatedGpu
from gpt2.model import GPT2, Attention, Size, size
from gpt2.step import Recipe, Training
from gpt2.study.experiments import Experiment
from gpt2.study.findings.failures import MIB, attempt, predicted_for
from gpt2.study.tables import Shown


def wrong_dimension(batch: int = 8, length: int = 512, **card) -> Shown:
    """`buffer[:T]` and `buffer[1:]` slice sequences, not tokens; it shows only at the loss, after a whole forward."""
    rows = []

    def program(inputs_of, targets_of):
        def run(gpu: SimulatedGpu) -> None:
            model = GPT2(size("124M")).cuda()
            buffer = torch.randint(0, 50_257, (batch, length + 1)).cuda()
            inputs, targets = inputs_of(buffer), targets_of(buffer)
            before = torch.cuda.memory_allocated()
            try:
                model(inputs, targets)
                said = "nothing"
            except ValueError as error:
                said = str(error)
            rows.append((tuple(inputs.shape), tuple(targets.shape), said,
                         (torch.cuda.max_memory_allocated() - before) / MIB))
        return run

    attempt(program(lambda b: b[:length], lambda b: b[1:]), **card)
    attempt(program(lambda b: b[:, :-1], lambda b: b[:, 1:]), **card)
    heads = ["inputs", "targets", "what it says", "taken by the forward (MiB)"]
    table = pd.DataFrame(rows, columns=heads)
    table.insert(0, "slices", ["buffer[:T], buffer[1:]", "buffer[:, :-1], buffer[:, 1:]"])
    return Shown(table, f"A buffer of {batch} x {length + 1} tokens. {predicted_for(**card)}")


def view_or_reshape(batch: int = 8, length: int = 1024, **card) -> Shown:
    """Targets skip a token per row, so their numbers are not one run of memory: a view cannot flatten them."""
    rows = []

    def program(gpu: SimulatedGpu) -> None:
        buffer = torch.randint(0, 50_257, (batch, length + 1)).cuda()
        targets = buffer[:, 1:]
        rows.append(("buffer[:, 1:]", _taken(lambda: buffer[:, 1:])))
        rows.append((".view(-1)", _taken(lambda: targets.view(-1))))
        rows.append((".reshape(-1)", _taken(lambda: targets.reshape(-1))))

    attempt(program, **card)
    table = pd.DataFrame([(what, *found) for what, found in rows], columns=["call", "what it says", "takes (bytes)"])
    return Shown(table, f"Of a buffer of {batch} x {length + 1:,} int64. {predicted_for(**card)}")


def _taken(call) -> tuple[str, int]:
    before = torch.cuda.memory_allocated()
    try:
        made = call()
    except RuntimeError as error:
        return str(error).partition(". ")[0], 0
    taken = torch.cuda.memory_allocated() - before
    del made
    return "nothing", taken


class InitialisedTooEarly(GPT2):
    """As GPT2, but `apply` comes before there is anything to apply it to."""

    def _initialise(self, module):
        """The layers keep PyTorch's own initial values."""


def initialised_too_early(layers: int = 2, width: int = 256, tokens: int = 64) -> Shown:
    """The first loss of a small model with a real vocabulary, on the CPU with real values; the bytes are the same."""
    small, rows = Size(layers, width, 4, 50_257, 128), []
    for title, kind in (("apply at the end", GPT2), ("apply at the top", InitialisedTooEarly)):
        torch.manual_seed(0)
        model = kind(small)
        batch = torch.randint(0, small.vocabulary, (1, tokens + 1))
        with torch.no_grad():
            _, loss = model(batch[:, :-1], batch[:, 1:])
        rows.append((title, model.lm_head.weight.detach().std().item(), round(loss.item(), 2),
                     sum(p.nbytes for p in model.parameters())))
    heads = ["self.apply(...)", "spread of the embedding", "first loss (nats)", "weights (bytes)"]
    return Shown(pd.DataFrame(rows, columns=heads),
                 f"{layers} layers of width {width}, vocabulary 50,257, on the CPU; a uniform guess has "
                 f"{math.log(50_257):.2f}.")


def cached(batch: int = 8, length: int = 1024, **card) -> dict[str, int]:
    """Bytes held over between two steps if each attention also returns k and v: as views, as copies, not at all."""
    found = {}
    for how in ("views of c_x", "copies of k and v", "not returned"):
        def program(gpu: SimulatedGpu, how: str = how) -> None:
            training, cache = Training(Recipe(batch=batch, length=length)), []
            training.step(1)
            before = torch.cuda.memory_allocated()
            hooks = [module.c_attn.register_forward_hook(_keeping(cache, how))
                     for module in training.model.modules() if isinstance(module, Attention)]
            training.step(2)
            for hook in hooks:
                hook.remove()
            found[how] = torch.cuda.memory_allocated() - before

        attempt(program, **card)
    return found


def _keeping(cache: list, how: str):
    """A hook on c_attn that does what a model with a KV cache does with its output."""
    def hook(module: nn.Module, args, c_x: torch.Tensor) -> None:
        _, k, v = c_x.detach().split(c_x.shape[-1] // 3, dim=2)
        if how == "views of c_x":
            cache.append((k, v))
        elif how == "copies of k and v":
            cache.append((k.clone(), v.clone()))
    return hook


def cached_table(**card) -> Shown:
    """What a cache that nobody reads costs a training run."""
    rows = [(how, size, size / MIB) for how, size in cached(**card).items()]
    return Shown(pd.DataFrame(rows, columns=["k and v of 12 layers", "held after the step (bytes)", "held (MiB)"]),
                 f"Above what is allocated between two steps anyway. {predicted_for(**card)}")


@lru_cache
def logits_held(batch: int = 8, *, gpu: str = "A40", torch_release: str = "2.5.1") -> Keepers:
    """Who keeps the blocks at the peak of the article's loop."""
    run = Experiment("logits", Recipe(batch=batch), steps=2).run

    def card() -> SimulatedGpu:
        return SimulatedGpu(gpu, torch=torch_release, stacks=True)

    trace = first_run(run, card)
    return at_event(trace, trace.peak(), run, card)


def keepers_table(found: Keepers, at_most: int = 10) -> Shown:
    """The keepers, largest first."""
    rows = [(kind, keeper, count, size / MIB) for kind, keeper, count, size in found.grouped()[:at_most]]
    return Shown(pd.DataFrame(rows, columns=["kept", "by", "blocks (count)", "MiB"]),
                 f"{format_size(found.allocated_bytes)} at the peak, blocks above 1 MiB: the largest keepers.")


def releases_table(found: Keepers) -> Shown:
    """What a `del` would change."""
    rows = [(", ".join(dict.fromkeys(r.names)), r.places[0][2], r.held_bytes, r.saved_allocated_bytes,
             r.saved_reserved_bytes) for r in found.releases]
    heads = ["del", "in", "frees (bytes)", "peak falls by (bytes)", "reserved falls by (bytes)"]
    return Shown(pd.DataFrame(rows, columns=heads), "Found by replaying the run with the earlier free.")
