"""Every byte has one owner, at every event, and the sum is what the allocator counts."""

from dataclasses import replace

import numpy as np
import pytest

from gpt2.memory import ledger as ledgers
from gpt2.memory.ledger import Ledger
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.trace import Block, Category, Event, Mark, Trace
from gpt2.step import Recipe, Training
from gpt2.study.paths import ROOT

MIB = 2**20
TINY = {"model": "tiny", "batch": 4, "length": 16}


def simulate(steps=3, **options):
    recipe = Recipe(**options)
    with SimulatedGpu("A40", torch="2.5.1") as card:
        training = Training(recipe, watch=card.watch)
        for number in range(1, steps + 1):
            training.step(number)
    return card.trace(vocabulary=recipe.size.vocabulary, tokens=recipe.tokens)


@pytest.fixture(scope="module")
def base():
    return Ledger(simulate())


def bytes_of(ledger, index):
    return ledger.at(index).set_index("category").allocated_bytes


def end_of(ledger, phase, step):
    return next(m.event_count for m in ledger.trace.marks if (m.name, m.step) == (phase, step)) - 1


# --- nothing is left over -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {}, {"attention": "sdpa"}, {"checkpoint": "block"}, {"checkpoint": "every-2"}, {"checkpoint": "attention"},
    {"checkpoint": "mlp"}, {"loss": "chunked"}, {"optimizer": "fused"}, {"optimizer": "loop"}, {"accumulate": 3},
    {"clip": 1.0}, {"set_to_none": False}, {"keep_logits": False}, {"moments": "bf16"}, {"step_in_backward": True},
    {"precision": "bf16"}, {"precision": "fp16"},
    {"checkpoint": "block", "loss": "chunked", "precision": "bf16", "attention": "sdpa"},
], ids=str)
def test_the_residual_is_zero_at_every_event(options):
    ledger = Ledger(simulate(**TINY | options))
    timeline = ledger.timeline()
    assert len(timeline) == len(ledger.trace)
    assert not timeline.residual_bytes.any()
    marks = ledger.unexplained()  # the allocator's own counters, not the trace's sums
    assert len(marks) > 10 and not marks.residual_bytes.any()


def test_the_residual_is_zero_for_the_published_step(base):
    assert not base.timeline().residual_bytes.any()
    assert not base.unexplained().residual_bytes.any()


def test_at_every_event_the_table_sums_to_allocated(base):
    allocated = base.trace.allocated_bytes()
    for index in range(100, len(base.trace), 97):
        table = base.at(index)
        assert table.allocated_bytes.sum() == allocated[index]
        assert table.share_ratio.sum() == pytest.approx(1)
        blocks = base.entries(index, None)
        assert blocks.allocated_bytes.sum() == allocated[index]
        slack = (blocks.allocated_bytes - blocks.requested_bytes).sum()
        assert slack == bytes_of(base, index)[Category.SLACK.value]


def test_a_block_older_than_the_trace_is_the_residual():
    """Two blocks were there before; the second is freed in view."""
    trace = Trace([Event("alloc", 0x1000, 500, 512), Event("free", 0x9000, 0, 1024), Event("free", 0x1000, 500, 512)],
                  [Mark("late", 1, 0, 512 + 1024 + 2048, 0, 0, 0)])
    timeline = Ledger(trace).timeline()
    assert timeline.residual_bytes.tolist() == [3072, 2048, 2048]
    assert timeline.allocated_bytes.tolist() == [3584, 2560, 2048]


# --- whose it is ----------------------------------------------------------------------------------------------------


def test_the_published_ledger_of_the_peak(base):
    peak = base.peak_owner([2])
    assert (peak.operator, peak.phase, peak.requested_bytes) == (
        "aten._log_softmax_backward_data", "backward", 1_646_821_376)
    assert peak.category == Category.LOSS.value
    assert round(peak.allocated_bytes / MIB) == 17_054
    owned = bytes_of(base, peak.index) / MIB
    fixed = [Category.PARAMETERS, Category.OPTIMIZER, Category.INPUTS, Category.WORKSPACE, Category.SLACK]
    assert round(sum(owned[c.value] for c in fixed)) == 1_494
    assert round(owned[Category.ACTIVATIONS.value]) == 9_278
    assert owned[Category.LOSS.value] == 4 * 1_646_821_376 / MIB
    assert round(owned[Category.SLACK.value], 1) == 5.8
    assert owned[Category.WORKSPACE.value] == 2 * 8.125
    assert owned[Category.GRADIENTS.value] == 0
    assert owned[Category.TEMPORARIES.value] * MIB == 4  # backward's first gradient, a 1


def test_what_is_there_between_steps(base):
    owned = bytes_of(base, end_of(base, "zero_grad", 2)) / MIB
    assert owned[Category.PARAMETERS.value] == owned[Category.OPTIMIZER.value] / 2 == 124_439_808 * 4 / MIB
    assert owned[Category.INPUTS.value] == 48 + 8 * 1025 * 8 / MIB
    for gone in (Category.GRADIENTS, Category.LOSS, Category.TEMPORARIES):
        assert owned[gone.value] == 0
    assert owned[Category.ACTIVATIONS.value] * MIB == 4  # the loss, whose name is still alive


def test_gradients_at_the_end_of_backward_are_one_per_parameter(base):
    owned = bytes_of(base, end_of(base, "del logits", 2))
    assert owned[Category.GRADIENTS.value] == 124_439_808 * 4
    assert owned[Category.LOSS.value] == 0


def test_gradients_grow_by_27_mib_a_block_and_the_head_waits(base):
    """From one block's norm to the next; the head's half is there from the start, the embedding's comes last."""
    marks = [b.born for b in base.blocks if b.event.step == 2 and b.event.phase == "backward"
             and b.event.operator == "aten.native_layer_norm_backward" and b.event.module.endswith("ln_1")
             and len(b.event.shape) == 3]
    assert len(marks) == 12
    gradients = base.timeline()[Category.GRADIENTS.value]
    growth = np.diff(gradients[marks])
    assert set(growth) == {7_087_872 * 4}
    assert round(growth[0] / MIB, 2) == 27.04
    head = 50_257 * 768 * 4
    assert gradients[marks[0]] > head
    assert gradients[end_of(base, "backward", 2)] - gradients[marks[-1]] < 2 * head


def test_attention_scores_are_temporaries_and_probabilities_activations(base):
    matrices = [(block, category) for block, category in zip(base.blocks, base.categories, strict=True)
                if block.event.step == 2 and block.event.phase == "forward" and block.event.module.endswith("h.5.attn")
                and block.event.shape == (8, 12, 1024, 1024)]
    owners = [category for _, category in matrices]
    assert owners.count(Category.ACTIVATIONS) == 1
    assert owners.count(Category.TEMPORARIES) == len(owners) - 1 >= 2


def test_recomputed_activations_are_activations_for_a_moment():
    ledger = Ledger(simulate(2, batch=2, checkpoint="block"))
    timeline = ledger.timeline([2])
    forward = timeline[timeline.phase == "forward"][Category.ACTIVATIONS.value]
    later = timeline[timeline.phase.isin(["recompute", "backward"])][Category.ACTIVATIONS.value]
    kept = 13 * 2 * 1024 * 768 * 4  # inputs of 12 blocks and of the final norm ...
    assert kept < forward.iloc[-1] < kept + 20 * MIB
    one_block = 15 * 2 * 1024 * 768 * 4 + 2 * 12 * 1024 * 1024 * 4  # its input is among the kept
    assert kept + one_block < later.max() < kept + one_block + 20 * MIB
    assert later.iloc[-1] == 4


def test_chunked_logits_are_the_loss():
    ledger = Ledger(simulate(2, batch=2, loss="chunked"))
    assert ledger.timeline([2])[Category.LOSS.value].max() == 3 * 2 * 1024 * 50_257 * 4 // 8


def test_without_gradients_kept_there_are_only_a_few():
    plain, stepping = (Ledger(simulate(**TINY, step_in_backward=value)).timeline([2])[Category.GRADIENTS.value].max()
                       for value in (False, True))
    assert stepping < plain * 0.65


def test_bf16_moments_are_half():
    states = [bytes_of(ledger, end_of(ledger, "zero_grad", 2))[Category.OPTIMIZER.value]
              for ledger in (Ledger(simulate(**TINY)), Ledger(simulate(**TINY, moments="bf16")))]
    assert states[0] == 2 * states[1] > 0


# --- without claims -------------------------------------------------------------------------------------------------


def test_rules_alone_find_the_same_owners_where_they_can(base):
    """With every claim taken away, and the vocabulary unknown too: phases, shapes and lives still tell."""
    library = Category.WORKSPACE.value
    events = [e._replace(category=library if e.category == library else "") for e in base.trace.events]
    bare = Ledger(replace(base.trace, events=events, meta={}))
    index = base.peak_owner([2]).index
    known, guessed = bytes_of(base, index), bytes_of(bare, index)
    for category in (Category.LOSS, Category.ACTIVATIONS, Category.OPTIMIZER, Category.TEMPORARIES, Category.SLACK):
        assert guessed[category.value] == known[category.value], category
    masks = 48 * MIB  # they move with the model, and nothing tells them from weights
    assert guessed[Category.PARAMETERS.value] == known[Category.PARAMETERS.value] + masks
    end = end_of(base, "del logits", 2)
    assert bytes_of(bare, end)[Category.GRADIENTS.value] == bytes_of(base, end)[Category.GRADIENTS.value]


@pytest.mark.parametrize("event, died, expected", [
    (Event("alloc", 1, 8, 512, step=0, phase="model"), None, Category.PARAMETERS),
    (Event("alloc", 1, 8, 512, step=0, phase="batch"), None, Category.INPUTS),
    (Event("alloc", 1, 8, 512, step=0, phase="warmup"), 1, Category.TEMPORARIES),
    (Event("alloc", 1, 8, 512, step=1, phase="forward", shape=(3, 7)), 1, Category.LOSS),
    (Event("alloc", 1, 8, 512, step=1, phase="forward", shape=(7,)), 1, Category.TEMPORARIES),
    (Event("alloc", 1, 8, 512, step=1, phase="forward", shape=(7, 3)), 3, Category.ACTIVATIONS),
    (Event("alloc", 1, 8, 512, step=1, phase="recompute", shape=(7, 3)), 3, Category.ACTIVATIONS),
    (Event("alloc", 1, 8, 512, step=1, phase="backward", shape=(1, 5)), 3, Category.GRADIENTS),
    (Event("alloc", 1, 8, 512, step=1, phase="backward", shape=(5,)), 1, Category.TEMPORARIES),
    (Event("alloc", 1, 8, 512, step=1, phase="backward", shape=(4,)), 3, Category.TEMPORARIES),
    (Event("alloc", 1, 8, 512, step=1, phase="optimizer"), None, Category.OPTIMIZER),
    (Event("alloc", 1, 8, 512, step=1, phase="optimizer"), 1, Category.TEMPORARIES),
    (Event("alloc", 1, 8, 512, step=1, phase=""), 3, Category.INPUTS),
    (Event("alloc", 1, 8, 512, step=1, phase="forward", category="gradients"), 3, Category.GRADIENTS),
])
def test_one_rule_at_a_time(event, died, expected):
    parameter = Event("alloc", 0x1000, 20, 512, shape=(5,), phase="model", category=Category.PARAMETERS.value)
    trace = Trace([event, event._replace(action="free"), parameter, event._replace(action="free", phase="later")],
                  meta={"vocabulary": 7})
    assert ledgers._categorise(trace, [Block(0, died, event)]) == [expected]


@pytest.mark.parametrize("name", ["base", "checkpoint", "chunked", "bf16"])
def test_a_recording_and_its_prediction_have_the_same_owners(name):
    """The recording knows shapes only where the profiler does, and no library's name; what was predicted knows all."""
    recorded = Ledger(Trace.load(ROOT / "results" / "measured" / "h200" / "traces" / f"{name}.json.gz"))
    recipe = recorded.trace.meta["recipe"]
    with SimulatedGpu("H200", torch="2.11.0") as card:
        training = Training(Recipe(**recipe), watch=card.watch)
        for step in (1, 2):
            training.step(step)
    predicted = Ledger(card.trace(vocabulary=50_257, tokens=recipe["batch"] * recipe["length"]))
    assert not recorded.timeline().residual_bytes.any()
    assert not recorded.unexplained().residual_bytes.any()
    tables = [bytes_of(ledger, ledger.peak_owner([2]).index) for ledger in (recorded, predicted)]
    assert tables[0].to_dict() == tables[1].to_dict()


# --- questions ------------------------------------------------------------------------------------------------------


def test_the_biggest_blocks(base):
    table = base.entries(base.peak_owner([2]).index, 5)
    assert (table.allocated_bytes.iloc[:4] == 1_646_821_376).all()
    assert table.size_mib.iloc[0] == 1570.53125
    assert set(table.operator[:4]) == {"aten.mm", "aten._log_softmax", "aten.nll_loss_backward",
                                       "aten._log_softmax_backward_data"}
    assert table.category[4] == Category.ACTIVATIONS.value


def test_a_timeline_of_one_step(base):
    table = base.timeline([2])
    assert set(table.step) == {2}
    assert table.allocated_bytes.max() == base.peak_owner([2]).allocated_bytes
    assert table.index[0] == next(i for i, e in enumerate(base.trace.events) if e.step == 2)


def test_single_questions_give_the_same(base):
    trace, index = base.trace, base.peak_owner([2]).index
    assert ledgers.peak_owner(trace, [2]) == base.peak_owner([2])
    assert ledgers.at(trace, index).equals(base.at(index))
    assert ledgers.entries(trace, index).equals(base.entries(index))
    assert ledgers.timeline(trace, [2]).equals(base.timeline([2]))
    assert ledgers.categorise(trace) == base.categories


def test_questions_without_an_answer(base):
    with pytest.raises(IndexError, match=f"event {len(base.trace)} of a trace of {len(base.trace)}"):
        base.at(len(base.trace))
    with pytest.raises(ValueError, match="no events in these steps"):
        base.peak_owner([9])
    assert Ledger(Trace()).timeline().empty
