"""What about mine? A module, a script, a snapshot file or a message of the reader's, and what the study says to it."""

from __future__ import annotations

import io
import runpy
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pandas as pd
import torch

from gpt2.memory import gpus, replay, snapshot
from gpt2.memory.answer import answer
from gpt2.memory.fit import Search, Trial, search
from gpt2.memory.keeping.keepers import Keepers, at_event, first_run
from gpt2.memory.ledger import Ledger
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.summary import summary
from gpt2.memory.trace import Trace
from gpt2.study import paths
from gpt2.study.interactive import guesses
from gpt2.study.others import subjects
from gpt2.study.tables import MIB, Shown

MOST = 4096  # the largest batch that is tried


# --- a module -----------------------------------------------------------------------------------------------------


def subject(build, data, loss) -> subjects.Subject:
    """Your module: `build()` makes it on the host, `data(batch)` its host tensors, `loss(model, data)` a scalar."""
    return subjects.Subject("yours", build, data, loss)


def small_gpt2() -> subjects.Subject:
    """A module of transformers as an example: four layers, random weights, nothing downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = GPT2Config(n_layer=4, n_embd=512, n_head=8, n_positions=512, bos_token_id=0, eos_token_id=0)
    return subject(lambda: GPT2LMHeadModel(config), lambda batch: (torch.randint(0, config.vocab_size, (batch, 512)),),
                   lambda model, data: model(input_ids=data[0], labels=data[0]).loss)


def trained(module: subjects.Subject, batch: int, *, gpu: str, torch_release: str, precision: str = "fp32",
            steps: int = 2) -> Trace:
    """Training steps of a module on a simulated card; running out of memory ends them, and is in the meta."""
    card = SimulatedGpu(gpu, torch=torch_release)
    try:
        with card:
            subjects.train(module, watch=card.watch, batch=batch, steps=steps, precision=precision)
    except torch.OutOfMemoryError:
        pass
    return card.trace(experiment=module.name, batch=batch, precision=precision)


def ledger(module: subjects.Subject, batch: int, **options) -> Shown:
    """Who owns the peak of a module's training step."""
    trace = trained(module, batch, **options)
    table = Ledger(trace).at(trace.peak([2]))
    table = table[table["allocated_bytes"] > 0]
    shown = pd.DataFrame({"owner": table["category"], "at the peak (MiB)": table["allocated_bytes"] / MIB,
                          "of it (share)": table["share_ratio"]})
    return Shown(shown, f"{module.name}, batch {batch}, step 2. Predicted: {options['gpu']}, "
                        f"torch {options['torch_release']}.")


def largest(module: subjects.Subject, gpu: str, *, torch_release: str, precision: str = "fp32",
            first: int = 8) -> Search:
    """The largest batch of a module that fits a card, and the one more that does not; both tried."""
    def attempt(number: int) -> Trial:
        trace = trained(module, number, gpu=gpu, torch_release=torch_release, precision=precision)
        found = answer(trace, owners=False)
        return Trial(number, found["fits"], found["peak_allocated_bytes"], found["peak_reserved_bytes"],
                     trace.marks[-1].allocated_bytes if trace.marks else 0, found["out_of_memory"])

    return search(attempt, gpus.find(gpu).free_bytes_at_start, first=first, most=MOST)


def fits(module: subjects.Subject, cards: tuple[str, ...], **options) -> Shown:
    """The largest batch on each card, what it takes, and what runs out with one more."""
    rows = []
    for name in cards:
        found = largest(module, name, **options)
        best = next((t for t in found.tried if t.number == found.largest), None)
        after = found.next.out_of_memory if found.next else None
        rows.append((name, gpus.find(name).free_bytes_at_start / MIB, found.largest,
                     best and best.peak_reserved_bytes / MIB,
                     f"{after['operator']} ({after['phase']})" if after else f"more than {MOST} not tried",
                     len(found.tried)))
    heads = ["card", "free at start (MiB)", "largest batch (sequences)", "reserved there (MiB)", "one more fails in",
             "runs tried (count)"]
    return Shown(pd.DataFrame(rows, columns=heads), "Predicted, no GPU; the batch that fits and the next one were run.")


# --- a script -----------------------------------------------------------------------------------------------------


def script(path: str, *, gpu: str, torch_release: str) -> Keepers:
    """Run a script on a simulated card, three times and unheard, and say who keeps the blocks at its peak alive."""
    found = Path(path)
    if not found.is_file():
        raise FileNotFoundError(f"no script {path}")

    def program(card: SimulatedGpu) -> dict:
        with _as_main(found):
            return runpy.run_path(str(found), run_name="__main__")

    def card() -> SimulatedGpu:
        return SimulatedGpu(gpu, torch=torch_release, stacks=True)

    trace = first_run(program, card)
    return at_event(trace, trace.peak(), program, card)


@contextmanager
def _as_main(path: Path):
    """argv and path as a script of its own has them, and silence."""
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = [str(path)], str(path.resolve().parent)
    nowhere = io.StringIO()
    try:
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield
    finally:
        sys.argv, sys.path[:] = before[0], before[1]


# --- a snapshot -----------------------------------------------------------------------------------------------------


def snapshot_trace(path: str) -> Trace:
    """A snapshot file as a trace; anything but plain data in it is refused."""
    return snapshot.to_trace(snapshot.read(path))


def snapshot_facts(trace: Trace, at_most: int = 8) -> Shown:
    """Who owns the peak of a recorded run, by the line that asked."""
    table = summary(trace, at_most)
    peak = table["peak"]
    rows = [(row["owner"], row["block_count"], row["bytes"] / MIB, row["share_ratio"]) for row in table["owners"]]
    heads = ["asked for by", "blocks (count)", "at the peak (MiB)", "of it (share)"]
    return Shown(pd.DataFrame(rows, columns=heads),
                 f"{peak['allocated_bytes'] / MIB:,.1f} MiB at the peak, in step {peak['step']} ({peak['phase']}); "
                 f"{table['known_share_ratio']:.1%} of its bytes have an owner. {' '.join(table['warnings'])}".strip())


def what_if(trace: Trace, cards: tuple[str, ...], *, torch_release: str = "2.11.0") -> Shown:
    """The recorded run on other cards and with other settings: would it fit, how much would it reserve?"""
    rows = []
    for name in cards:
        for row in replay.best_settings(trace, gpu=name, torch=torch_release):
            rows.append((name, row["allocator_conf"] or "default", row["fits"], row["peak_allocated_bytes"] / MIB,
                         row["peak_reserved_bytes"] / MIB))
    heads = ["card", "settings", "fits", "peak allocated (MiB)", "peak reserved (MiB)"]
    return Shown(pd.DataFrame(rows, columns=heads), "The recorded requests, replayed; the most helpful setting first.")


def smallest_room(trace: Trace, *, torch_release: str = "2.11.0", step_bytes: int = 2 * MIB) -> dict[str, int]:
    """The least memory, in bytes, with which the recorded run fits, natively and with expandable segments."""
    found = {}
    for conf in ("", "expandable_segments:True"):
        low, high = max(trace.allocated_bytes()) // step_bytes, 2 * max(trace.reserved_bytes()) // step_bytes
        while high - low > 1:
            middle = (low + high) // 2
            ok = replay.replay(trace, capacity_bytes=middle * step_bytes, allocator_conf=conf, torch=torch_release).fits
            low, high = (low, middle) if ok else (middle, high)
        found[conf or "default"] = high * step_bytes
    return found


def room(trace: Trace, **options) -> Shown:
    """`smallest_room` as a table."""
    rows = [(conf, size / MIB) for conf, size in smallest_room(trace, **options).items()]
    return Shown(pd.DataFrame(rows, columns=["settings", "least room it fits into (MiB)"]),
                 "Tried in steps of 2 MiB by replaying the recorded requests.")


# --- the guesses ----------------------------------------------------------------------------------------------------


def scored() -> Shown:
    """The guesses written down in notebook 01, yours beside those of the first article's author."""
    own = guesses.score().to_dict("records")
    author = guesses.score({name: guess for name, (_, _, guess) in guesses.QUESTIONS.items()}).to_dict("records")
    rows = [(mine["question"], f"{mine['truth']} {mine['unit']}".strip(), mine["guess"], mine["verdict"],
             theirs["guess"] or "huge", theirs["verdict"] if theirs["guess"] else "much too high")
            for mine, theirs in zip(own, author, strict=True)]
    heads = ["question", "published answer", "your guess", "verdict", "the author's guess", "verdict on it"]
    return Shown(pd.DataFrame(rows, columns=heads), "Guesses are kept in build/guesses.json, on your machine only.")


def place(path: str) -> str:
    """A path of the parameters cell: as given, or as seen from the notebooks' folder."""
    found = Path(path)
    return str(found if found.is_file() else paths.ROOT / "notebooks" / path)
