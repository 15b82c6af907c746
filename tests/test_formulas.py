"""The arithmetic of the articles, against what they print and against the simulated ledger, byte for byte."""

import math
import time

import pytest

from gpt2.memory import formulas
from gpt2.memory.ledger import Ledger
from gpt2.memory.saved import saved_tensors
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.trace import Category
from gpt2.model import SIZES, size
from gpt2.step import Recipe, Training

MIB = 2**20
GPT2_SMALL = size("124M")
PUBLISHED_PEAKS_MIB = {8: 17_054, 16: 32_611, 18: 36_489, 20: 40_375}


def simulate(**options):
    with SimulatedGpu("A40", torch="2.5.1") as card:
        training = Training(Recipe(**options), watch=card.watch)
        for number in (1, 2):
            training.step(number)
    return card.trace()


def by_category(entries) -> dict:
    sums = dict.fromkeys((c.value for c in Category), 0)
    for entry in entries:
        sums[entry.category.value] += entry.bytes
    return sums


def test_parameters_of_all_sizes():
    import torch

    from gpt2.model import GPT2

    for name, widths in SIZES.items():
        with torch.device("meta"):
            model = GPT2(widths)
        assert formulas.parameters(widths) == sum(p.numel() for p in model.parameters()), name
        block = model.transformer.h[0]
        assert formulas.block_parameters(widths) == sum(p.numel() for p in block.parameters())
    assert formulas.block_parameters(GPT2_SMALL) == 7_087_872


def test_sixteen_bytes_per_parameter():
    states = formulas.states(GPT2_SMALL)
    assert formulas.total(states) == 16 * 124_439_808
    assert [round(entry.bytes / MIB, 1) for entry in states] == [474.7] * 4
    assert 16 * 7e9 == 112e9


def test_a_blocks_saved_tensors_are_769_mib():
    entries = {entry.name: entry.bytes / MIB for entry in formulas.block_saved(GPT2_SMALL, 8, 1024)}
    assert entries["LayerNorm 1 input"] + entries["LayerNorm 1 output"] == 48
    assert entries["q, k and v, each in one piece"] == 72
    assert entries["attention probabilities"] == 384
    assert entries["causal mask comparison"] == 1
    assert entries["attention output, before projection"] == 24
    assert entries["LayerNorm 2 input"] + entries["LayerNorm 2 output"] == 48
    assert entries["MLP hidden, before GELU"] + entries["MLP hidden, after GELU"] == 192
    assert round(sum(entries.values()), 1) == 769.1


@pytest.mark.parametrize("batch, length", [(8, 1024), (3, 256)])
def test_a_blocks_formula_is_what_hooks_count_tensor_for_tensor(batch, length):
    import torch

    from gpt2.model import GPT2

    with SimulatedGpu("A40", torch="2.5.1"):
        block = GPT2(GPT2_SMALL).cuda().transformer.h[0]
        x = torch.empty(batch, length, 768, device="cuda", requires_grad=True)
        counted = sorted(saved_tensors(block, x).storage_bytes)
    expected = []
    for entry in formulas.block_saved(GPT2_SMALL, batch, length):
        parts = 3 if entry.name.startswith("q, k") else 2 if "mean" in entry.name else 1
        expected += [entry.bytes // parts] * parts
    assert counted == sorted(expected)


@pytest.mark.parametrize("recipe", [{"batch": 8}, {"batch": 5, "length": 384}, {"model": "350M", "batch": 2}], ids=str)
def test_the_peak_equals_the_simulated_ledger_to_the_byte(recipe):
    trace, recipe = simulate(**recipe), Recipe(**recipe)
    ledger = Ledger(trace)
    at_peak = ledger.at(ledger.peak_owner([2]).index).set_index("category").allocated_bytes
    expected = by_category(formulas.peak(recipe.size, recipe.batch, recipe.length))
    slack = Category.SLACK.value
    assert {name: n for name, n in at_peak.items() if name not in (slack, "residual")} == {
        name: n for name, n in expected.items() if name not in (slack, Category.OUTSIDE.value)}
    assert at_peak["residual"] == 0


def test_the_end_of_forward_equals_the_simulated_ledger_to_the_byte():
    trace = simulate(batch=4)
    end = next(mark.event_count for mark in trace.marks if (mark.name, mark.step) == ("forward", 2)) - 1
    at_end = Ledger(trace).at(end).set_index("category").allocated_bytes
    assert at_end[Category.ACTIVATIONS.value] == formulas.total(formulas.saved(GPT2_SMALL, 4, 1024))
    assert at_end[Category.LOSS.value] == 2 * 4 * 1024 * 50_257 * 4


def test_the_published_ledger_of_the_peak():
    peak = formulas.peak(GPT2_SMALL, 8, 1024)
    fixed = formulas.total(formulas.fixed(GPT2_SMALL, 8, 1024)) + formulas.PUBLISHED_SLACK_BYTES
    kept = formulas.total(formulas.saved(GPT2_SMALL, 8, 1024))
    vocabulary = formulas.total(formulas.vocabulary_sized(GPT2_SMALL, 8, 1024))
    assert round(fixed / MIB) == 1_494
    assert round(kept / MIB) == 9_278
    assert round(vocabulary / MIB) == 6_282
    assert round((formulas.total(peak) + formulas.PUBLISHED_SLACK_BYTES) / MIB) == 17_054


@pytest.mark.parametrize("batch, published", PUBLISHED_PEAKS_MIB.items())
def test_the_calculator_reproduces_the_published_peaks_within_13_mib(batch, published):
    ours = formulas.total(formulas.calculator(GPT2_SMALL, batch, 1024)) / MIB
    assert abs(ours - published) < 13
    assert abs(ours - published) / published < 0.0004


def test_half_the_length_more_than_doubles_the_batch():
    def largest(length):
        return next(b for b in range(1, 200)
                    if formulas.reserved_estimate(formulas.total(formulas.calculator(GPT2_SMALL, b + 1, length)))
                    > 45_440 * MIB)

    assert largest(1024) == 20
    assert largest(512) > 2 * largest(1024)


def test_the_straight_line_says_22():
    slope = formulas.bytes_per_sequence(17_054, 1_494, 8)
    assert slope == 1_945
    assert (45_440 - 1_494) / slope == pytest.approx(22.6, abs=0.05)
    assert formulas.straight_line_batch(45_440, 1_494, slope) == 22
    assert formulas.straight_line_batch(1_000, 1_494, slope) == 0


def test_reserved_is_estimated_11_percent_above():
    assert formulas.reserved_estimate(40_375) == 44_948
    assert formulas.reserved_estimate(1000) == 1113


def test_the_second_articles_worked_example():
    widths = size("1.3B")
    parts = formulas.worked_example(widths, 8, 2048)
    assert parts[0].numel == pytest.approx(1.31e9, rel=0.01)
    assert parts[0].bytes / 1e9 == pytest.approx(21, abs=0.5)
    assert formulas.layer_16bit(widths, 8, 2048) / 1e9 == pytest.approx(1.14, abs=0.005)
    assert parts[1].bytes / 1e9 == pytest.approx(27, abs=0.5)
    assert parts[2].numel == pytest.approx(0.8e9, rel=0.03)
    assert parts[2].bytes / 1e9 > 3
    assert 50 < formulas.total(parts) / 1e9 < 60
    assert formulas.total(formulas.worked_example(widths, 16, 2048)) / 1e9 > 80
    assert formulas.update_traffic(1_300_000_000) / 1e9 == pytest.approx(36, abs=0.5)
    assert formulas.update_traffic(1_300_000_000) / 3.35e12 == pytest.approx(0.010, abs=0.001)


def test_formulas_say_what_they_compute():
    """Every formula, evaluated as text, is the number beside it."""
    for name in ("tiny", "124M", "1.3B"):
        s, B, T = size(name), 3, 16
        letters = {"L": s.layers, "D": s.width, "H": s.heads, "V": s.vocabulary, "C": s.context, "B": B, "T": T,
                   "P": formulas.parameters(s), "W": formulas.CUBLAS_WORKSPACE_BYTES, "s": T, "b": B, "h": s.width,
                   "slack": formulas.PUBLISHED_SLACK_BYTES}
        for entry in [*formulas.peak(s, B, T), *formulas.saved(s, B, T), *formulas.states(s),
                      *formulas.block_saved(s, B, T), *formulas.calculator(s, B, T), *formulas.worked_example(s, B, T)]:
            text = entry.formula.replace("·", "*").replace("²", "**2")
            assert eval(text, {}, letters) == entry.numel, entry  # noqa: S307 (our own formulas)


def test_formulas_are_instant():
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        formulas.total(formulas.calculator(GPT2_SMALL, 8, 1024)) + formulas.total(formulas.peak(GPT2_SMALL, 8, 1024))
        best = min(best, time.perf_counter() - start)
    assert best < 0.02
