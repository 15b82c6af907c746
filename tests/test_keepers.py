"""Who keeps each large block alive at the peak, and what a `del` there saves: held against runs that have the `del`."""

import inspect
import runpy
import textwrap

import pytest

from gpt2 import model
from gpt2.memory.keeping.holders import look
from gpt2.memory.keeping.keepers import LARGE, at_event, first_run, keepers
from gpt2.memory.keeping.unread import is_unread, statement
from gpt2.memory.simulator import SimulatedGpu
from gpt2.step import Recipe
from gpt2.study.experiments import Experiment

MiB = 2**20
LOGITS = 1_646_821_376  # bytes of 8 x 1,024 x 50,257 fp32 numbers: 1,570.5 MiB


def card() -> SimulatedGpu:
    return SimulatedGpu("A40", torch="2.5.1", stacks=True)


def training(steps: int = 2, **recipe):
    return Experiment("test", Recipe(**recipe), steps=steps).run


def peaks(program) -> tuple[int, int]:
    """Allocated and reserved of a run as it is."""
    gpu = SimulatedGpu("A40", torch="2.5.1")
    with gpu:
        kept = program(gpu)
    del kept
    return gpu.allocator.max_allocated_bytes, gpu.allocator.max_reserved_bytes


def release(found, name: str):
    return next(r for r in found.releases if name in r.names)


# --- the first cases: GPT-2 ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch_20():
    return keepers(training(batch=20), card)


def test_at_batch_20_every_large_block_at_the_peak_has_its_keeper(batch_20):
    trace, peak = batch_20.trace, batch_20.event
    large = [b.event.block_bytes for b in trace.live_at(peak) if b.event.block_bytes > LARGE]
    assert sorted(row.bytes for row in batch_20.rows) == sorted(large)
    assert all(row.keeper for row in batch_20.rows)
    kinds = {}
    for row in batch_20.rows:
        kinds.setdefault(row.kind, []).append(row)
    assert set(kinds) == {"saved for backward", "name", "parameters", "optimizer", "library", "engine"}
    assert [row.keeper.split(" (")[0] for row in kinds["name"]] == ["logits in Training.step"]
    assert sorted(row.keeper for row in kinds["engine"]) == [
        "an operand of the operator that runs", "aten._log_softmax_backward_data, which is making it"]
    saved = [row for row in kinds["saved for backward"] if row.category == "loss"]
    assert [row.keeper for row in saved] == ["LogSoftmaxBackward0 of GPT2"]
    scores = [row for row in kinds["saved for backward"] if row.made_by.startswith("aten._softmax")]
    assert [row.keeper for row in scores] == [
        f"BmmBackward0 of transformer.h.{i}.attn and SoftmaxBackward0 of transformer.h.{i}.attn" for i in range(12)]


def test_letting_logits_go_before_backward_is_the_edited_run_to_the_byte(batch_20):
    found = release(batch_20, "logits")
    assert found.held_bytes == LOGITS * 20 // 8 and found.blocks == 2
    assert found.places[0][0].endswith("gpt2/step.py") and found.places[0][2] == "Training.step"
    edited = peaks(training(batch=20, keep_logits=False))
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == edited
    assert found.saved_allocated_bytes == found.held_bytes  # one of four tensors of this size at the peak


def test_logits_are_held_by_their_name_alone_when_backward_ends():
    program = training(batch=8, steps=1)
    trace = first_run(program, card)
    end = next(m.event_count for m in trace.marks if m.name == "backward") - 1
    last = max(i for i in range(end) if trace.events[i].action == "alloc")
    found = at_event(trace, last, program, card)
    assert [(row.bytes, row.kind) for row in found.rows if row.category == "loss"] == [(LOGITS, "name")]


@pytest.mark.parametrize(("names", "line"), [
    (["y"], "y_BTD = y.transpose(1, 2).contiguous().view(B, T, D)"),
    (["score"], 'masked_score = score.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))'),
    (["masked_score"], "p = F.softmax(masked_score, dim=-1)"),
])
def test_names_in_the_attention_are_the_edited_run_to_the_byte(names, line, monkeypatch):
    program = training(batch=2, length=512)
    trace = first_run(program, card)
    event = next(i for i, e in enumerate(trace.events) if e.step == 2 and e.module == "transformer.h.3.attn.c_proj")
    found = release(at_event(trace, event, program, card), names[0])
    assert found.blocks == 24  # twelve layers, two steps
    source = textwrap.dedent(inspect.getsource(model.Attention.forward))
    indent = next(text[:len(text) - len(text.lstrip())] for text in source.splitlines() if line in text)
    assert source.count(line) == 1
    there = dict(vars(model))
    exec(source.replace(line, f"{line}\n{indent}del {', '.join(names)}"), there)
    monkeypatch.setattr(model.Attention, "forward", there["forward"])
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == peaks(program)


# --- small scripts ---------------------------------------------------------------------------------------------------

HEAD = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
x = torch.randn(2048, 1024, device="cuda")
"""


def script(folder, body: str):
    """A program that runs this text as a file."""
    path = folder / f"script{len(list(folder.iterdir()))}.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return lambda gpu: runpy.run_path(str(path), run_name="__main__")


def named(found) -> list[str]:
    return [row.keeper.partition(" (")[0] for row in found.rows if row.kind in ("name", "container")]


@pytest.mark.parametrize(("body", "keeper"), [
    ("kept = []\nfor i in range(2):\n    with torch.no_grad():\n        kept.append(net(x))\n    big = net(x)\n",
     "kept[0] in <module>"),
    ("last = {}\nwith torch.no_grad():\n    last['out'] = net(x)\nnet(x)\n", "last['out'] in <module>"),
    ("with torch.no_grad():\n    net.last = net(x)\nnet(x)\n", "net.last in <module>"),
    ("def maker():\n    with torch.no_grad():\n        y = net(x)\n    return lambda: y\nf = maker()\nnet(x)\n", "f"),
    ("def boom():\n    with torch.no_grad():\n        local = net(x)\n    raise ValueError\n"
     "try:\n    boom()\nexcept ValueError as error:\n    net(x)\n    net(net(x))\n",
     "a traceback or generator, by local in boom"),
    ("def inner(a):\n    return net(net(a))\ndef outer():\n    with torch.no_grad():\n        held = net(x)\n"
     "    return inner(x)\nouter()\n", "held in outer"),
])
def test_what_holds_is_named(tmp_path, body, keeper):
    found = keepers(script(tmp_path, body), card)
    assert any(text == keeper or text.startswith(keeper) for text in named(found)), found.text()


@pytest.mark.parametrize(("body", "name", "line"), [
    ("for i in range(2):\n    y = net(x)\n    loss = y.square().sum()\n    loss.backward()\n", "y", 4),
    ("def step(a):\n    out = {'y': net(a)}\n    loss = out['y'].sum()\n    net(a)\n    loss.backward()\n"
     "step(x)\nstep(x)\n", "out", 4),
    ("def step(a):\n    with torch.no_grad():\n        first = net(a)\n        other = first\n    z = net[0](a)\n"
     "    z = net[1](z)\n    return z\nstep(x)\n", "first", 5),
])
def test_each_suggested_del_is_the_edited_script_to_the_byte(tmp_path, body, name, line):
    found = keepers(script(tmp_path, body), card)
    all_names = next((r for r in found.releases if name in r.names), None)
    assert all_names is not None, found.text()
    assert {place[1] for place in all_names.places} == {HEAD.count("\n") + line}
    lines = body.splitlines()
    indent = lines[line - 1][:len(lines[line - 1]) - len(lines[line - 1].lstrip())]
    lines.insert(line - 1, f"{indent}del {', '.join(dict.fromkeys(all_names.names))}")
    edited = "\n".join(lines)
    assert (all_names.peak_allocated_bytes, all_names.peak_reserved_bytes) == peaks(script(tmp_path, edited))


def test_what_is_read_later_or_held_elsewhere_too_is_not_suggested(tmp_path):
    body = ("kept = []\ndef step(a):\n    with torch.no_grad():\n        later = net(a)\n        twice = net(a)\n"
            "    kept.append(twice)\n    z = net(net(a))\n    return later\nstep(x)\nprint(len(kept))\n")
    found = keepers(script(tmp_path, body), card)
    texts = named(found)
    assert any("later in step" in text for text in texts) and any("twice in step" in text for text in texts)
    assert not [r for r in found.releases if {"later", "twice"} & set(r.names)]


def test_a_program_that_goes_another_way_is_refused(tmp_path):
    turns = []

    def program(gpu):
        import torch

        turns.append(1)
        kept = [torch.empty(MiB * len(turns), device="cuda") for _ in range(3)]
        return kept

    with pytest.raises(ValueError, match="another course the second time"):
        keepers(program, card)
    with pytest.raises(ValueError, match="nothing is allocated"):
        keepers(lambda gpu: None, card)


def test_looking_changes_nothing():
    program, seen = training(model="tiny", batch=2, length=16, checkpoint="block"), []
    plain = first_run(program, card)
    gpu = card()
    record = gpu.allocator.record

    def and_look(*event):
        record(*event)
        if len(gpu.events) % 300 == 0:
            seen.append(look(gpu, {e.address for e in gpu.events}))

    gpu.allocator.record = and_look
    with gpu:
        program(gpu)
        looked = gpu.trace()
    assert len(seen) > 1 and any(held.saved for each in seen for held in each.values())
    assert looked.events == plain.events


def test_out_of_memory_is_no_error():
    small = keepers(training(batch=8), lambda: SimulatedGpu("A40", torch="2.5.1", stacks=True, limit_bytes=9_000 * MiB))
    assert small.rows and small.trace.meta["out_of_memory"]


# --- where a del may stand -------------------------------------------------------------------------------------------


def sample(flag):
    a = flag + 1
    b = a * 2
    for _ in range(3):
        b = b + 1
        c = b
    with open("x"):
        d = (c +
             b)
    return d


@pytest.mark.parametrize(("name", "line", "expected"), [
    ("a", 2, False), ("a", 3, True), ("b", 4, False), ("b", 5, False), ("c", 3, False), ("c", 4, True), ("c", 7, False),
    ("c", 9, True), ("b", 8, False), ("d", 9, False), ("flag", 2, True)])
def test_a_name_is_unread_from_the_statement_after_its_last_use(name, line, expected):
    first = sample.__code__.co_firstlineno
    where = statement(__file__, first + line)
    assert is_unread(sample.__code__, where, name) is expected


def test_a_statement_over_lines_is_one_and_a_head_is_not_its_body():
    first = sample.__code__.co_firstlineno
    assert statement(__file__, first + 8) == (first + 7, first + 8)
    assert statement(__file__, first + 3) == (first + 3, first + 3)


def test_a_name_that_an_inner_function_reads_is_never_unread():
    def outer():
        a = 1
        def inner():
            return a
        return inner

    where = statement(__file__, outer.__code__.co_firstlineno + 4)
    assert not is_unread(outer.__code__, where, "a")
