"""Every figure, drawn from a small real trace or table: right colours, right order, no text on another or cut off."""

import inspect
from itertools import combinations, pairwise

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from gpt2.memory.ledger import Ledger, categorise
from gpt2.memory.simulator import SimulatedGpu
from gpt2.memory.trace import Category, Event, Trace
from gpt2.step import Recipe, Training
from gpt2.study import figures, palette
from gpt2.study.figures import drawing, labels
from gpt2.study.results import save_figure

MIB = 2**20
TINY = Recipe(model="tiny", batch=4, length=16)


def stepped(recipe: Recipe, steps: int = 2, **options) -> Trace:
    """A run with a mark at every block, whether it fits or not."""
    with SimulatedGpu("A40", torch="2.5.1", **options) as card:
        try:
            training = Training(recipe, watch=card.watch)
            for name, block in training.model.named_modules():
                if name.count(".") == 2:
                    block.register_forward_hook(lambda *_, name=name: card.mark(f"{name} out"))
                    block.register_full_backward_hook(lambda *_, name=name: card.mark(f"{name} back"))
            for step in range(1, steps + 1):
                training.step(step)
        except torch.OutOfMemoryError:
            pass
        return card.trace()


@pytest.fixture(scope="module")
def trace() -> Trace:
    return stepped(TINY)


@pytest.fixture(scope="module")
def failed() -> Trace:
    """A small GPT-2 on a card of 2 GiB, which cannot hold its loss."""
    return stepped(Recipe(batch=1, length=384), limit_bytes=2150 * MIB)


def sweep() -> pd.DataFrame:
    rows = [{"kind": kind, "batch": batch, "fits": batch <= 20, "peak_allocated_bytes": (1494 + 1944 * batch) * MIB,
             "peak_reserved_bytes": 1.11 * (1494 + 1944 * batch) * MIB}
            for kind in ("published", "predicted", "measured") for batch in (8, 16, 20, 21)]
    return pd.DataFrame(rows)


def lines(trace: Trace) -> pd.DataFrame:
    """The watched lines as a table, published beside predicted."""
    marks = [mark for mark in trace.marks if " out" not in mark.name and " back" not in mark.name]
    rows = [{"line": f"{mark.name} {mark.step}", "kind": kind, "allocated_bytes": mark.allocated_bytes,
             "change_bytes": mark.allocated_bytes - before.allocated_bytes}
            for before, mark in pairwise(marks) for kind in ("predicted", "published")]
    return pd.DataFrame(rows)


def kernels() -> pd.DataFrame:
    rows = [{"lane": lane, "phase": phase, "start_ms": wide * (n + 40 * turn), "duration_ms": 0.9 * wide}
            for lane, wide in (("host", 0.1), ("device", 0.5)) for turn, phase in enumerate(("forward", "backward"))
            for n in range(40)]
    return pd.DataFrame(rows)


def savings() -> pd.DataFrame:
    names = ["baseline", "bf16 autocast", "fused attention", "chunked cross-entropy", "checkpoint every block"]
    peaks = [n * MIB for n in (17054, 12000, 8000, 5000, 4900)]
    return pd.DataFrame({"saving": names, "configuration": names, "peak_bytes": peaks,
                         "step_ms": [200.0, 120.0, 90.0, 95.0, 118.0],
                         "largest_batch": [20, 28, 60, 140, 410],
                         "token_us": [30.1, 14.0, 9.1, 9.3, float("nan")],
                         "category": [None, "activations", "activations", "loss", "activations"]})


def small_steps() -> pd.DataFrame:
    rows = [{"saving": saving, "tokens_count": tokens, "peak_bytes": peak * MIB, "category": category}
            for saving, category, peaks in (
                ("baseline", None, (2494, 2506, 13058)), ("bf16", "activations", (2498, 2505, 9996)),
                ("chunks", "loss", (2493, 2503, 7561)), ("fused", "temporaries", (2339, 2425, 13058)))
            for tokens, peak in zip((128, 512, 8192), peaks, strict=True)]
    return pd.DataFrame(rows)


def estimated() -> pd.DataFrame:
    rows = [("weights", "parameters", 5.2e9, 5.3e9, 5.3e9), ("gradients", "gradients", 5.2e9, 0.0, None),
            ("vocabulary-sized tensors", "loss", 6.6e9, 9.8e9, 9.8e9)]
    return pd.DataFrame(rows, columns=["line", "category", "estimate_bytes", "found_bytes", "recorded_bytes"])


def drawn(name: str, trace: Trace, failed: Trace):
    """Figure `name` from small data."""
    timeline = Ledger(trace).timeline([2])
    readings = [mark for mark in trace.marks if mark.step == 2]
    caption = figures.conditions(trace, TINY.describe())
    lengths = pd.DataFrame([{"kind": kind, "length": n, "linear_bytes": 385 * MIB * n // 1024,
                             "square_bytes": 384 * MIB * n * n // 2**20}
                            for kind in ("predicted", "measured") for n in (128, 256, 512, 1024)])
    saved = pd.DataFrame({"tensor": ["attention probabilities", "MLP hidden", "causal mask"], "shape": [
        (8, 12, 1024, 1024), "2 × (8, 1,024, 3,072)", (1, 1, 1024, 1024)], "saved_bytes": [384 * MIB, 192 * MIB, MIB]})
    steps = pd.DataFrame([{"configuration": name, "step": n, "fits": n < 9,
                           "allocated_bytes": (900 - 40 * (n % 3)) * MIB, "reserved_bytes": (1000 + grows * n) * MIB}
                          for name, grows in (("random lengths", 50), ("bucketed lengths", 0)) for n in range(1, 10)])
    updates = pd.DataFrame({"implementation": ["loop", "foreach", "fused"], "kernel_count": [2072, 88, 5],
                            "update_ms": [21.3, 2.5, 1.0], "temporary_bytes": [150 * MIB, 475 * MIB, 0]})
    copies = pd.DataFrame([{"memory": memory, "call": call, "size_bytes": size, "copy_ms": size / (speed * 1e6),
                            "host_ms": size / (speed * 1e6) * (call == "blocking" or memory == "pageable") + 0.01}
                           for size in (65_536, 154_140_672) for memory, speed in (("pageable", 8), ("pinned", 55))
                           for call in ("blocking", "non_blocking")])
    arguments = {
        "staircase": (lines(trace),), "saved_tensors": (saved,), "mountain": (trace, timeline, readings),
        "step_by_owner": (trace, timeline), "allocator_trace": (trace, readings), "growth": (lengths,),
        "batch_sweep": (sweep(),), "segment_map": (failed, categorise(failed)), "fragmentation": (steps,),
        "waterfall": (savings(),), "frontier": (savings(),), "ladder": (savings(),), "optimizers": (updates,),
        "kernel_timeline": (kernels(),), "copies": (copies,), "crossovers": (small_steps(),),
        "estimate": (estimated(),)}
    options = {"batch_sweep": {"capacity_bytes": 45_440 * MIB, "fixed_bytes": 1494 * MIB, "sequence_bytes": 1945 * MIB,
                               "gpu": "A40"}, "fragmentation": {"capacity_bytes": 1500 * MIB}}
    return getattr(figures, name)(*arguments[name], subtitle=caption, **options.get(name, {}))


ELSEWHERE = ("gpt2.study.figures.stream", "gpt2.study.figures.failures")  # test_figures_stream.py, test_failures.py
NAMES = [name for name in figures.__all__ if "subtitle" in inspect.signature(getattr(figures, name)).parameters
         and getattr(figures, name).__module__ not in ELSEWHERE]
every_figure = pytest.mark.parametrize("name", NAMES)


def texts(figure) -> list[tuple[str, object]]:
    """What is written, each with its box in pixels; tick labels of ticks outside the axes are not drawn."""
    figure.set_canvas(FigureCanvasAgg(figure))
    figure.canvas.draw()
    renderer, found = figure.canvas.get_renderer(), []
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                hidden |= {tick.label2} | (set() if low <= tick.get_loc() <= high else {tick.label1})
        if not axes.axison:
            hidden |= set(axes.findobj(Text)) - set(axes.texts)
    for text in figure.findobj(Text):
        if text.get_text().strip() and text.get_visible() and text not in hidden:
            found.append((text.get_text(), text.get_window_extent(renderer)))
    return found


def overlap(a, b) -> float:
    """Pixels by which two boxes cover each other, in the direction in which they do so least."""
    return min(min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0))


@every_figure
def test_no_text_covers_another_or_leaves_the_canvas(name, trace, failed):
    figure = drawn(name, trace, failed)
    written, canvas = texts(figure), figure.bbox
    assert len(written) > 4
    outside = [text for text, box in written if box.x0 < 0 or box.y0 < 0 or box.x1 > canvas.x1 or box.y1 > canvas.y1]
    assert not outside
    collisions = [(a[0], b[0]) for a, b in combinations(written, 2) if overlap(a[1], b[1]) > 2]
    assert not collisions


@every_figure
def test_the_same_data_give_the_same_bytes(name, trace, failed, tmp_path, monkeypatch):
    monkeypatch.setenv("STUDY_OUT", str(tmp_path))
    files = []
    for _ in range(2):
        figure = drawn(name, trace, failed)
        picture = save_figure(figure, name, figures.alt(figure))
        files.append((picture.png, (tmp_path / "figures" / f"{name}.svg").read_bytes()))
    assert files[0] == files[1]


@every_figure
def test_alt_text_states_the_finding_with_a_number(name, trace, failed):
    text = figures.alt(drawn(name, trace, failed))
    assert len(text) >= 40 and any(sign.isdigit() for sign in text.partition(". ")[0] + text)
    assert "nan" not in text


@every_figure
def test_axes_of_bytes_start_at_zero_and_name_their_unit(name, trace, failed):
    for axes in drawn(name, trace, failed).axes:
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            if "MiB" in axis.label.get_text() or "GiB" in axis.label.get_text():
                assert min(limits) == 0


def test_a_title_that_is_given_is_taken(trace):
    timeline = Ledger(trace).timeline([2])
    figure = figures.step_by_owner(trace, timeline, title="The loss is small in a tiny model", subtitle="x")
    assert figures.alt(figure).startswith("The loss is small in a tiny model.")
    with pytest.raises(ValueError, match="at least 40 characters"):
        drawing.Sheet("Big", "")


def test_a_stack_has_the_colours_and_the_order_of_the_categories(trace):
    timeline = Ledger(trace).timeline([2])
    figure = figures.step_by_owner(trace, timeline, subtitle="x")
    bands = [matplotlib.colors.to_hex(band.get_facecolor()[0]).upper() for band in figure.axes[0].collections]
    assert bands == [palette.COLOURS[c].upper() for c in Category if c.value in timeline]
    bar = [matplotlib.colors.to_hex(patch.get_facecolor()).upper() for patch in figure.axes[1].patches]
    at_peak = timeline.loc[trace.peak({2})]
    assert bar == [palette.COLOURS[c].upper() for c in Category if at_peak.get(c.value, 0) > 0]


def test_the_stack_reaches_the_peak_of_the_trace(trace):
    timeline = Ledger(trace).timeline([2])
    kept = labels.owners(timeline).loc[trace.peak({2})].sum()
    assert palette.mib(kept, 0) in figures.alt(figures.step_by_owner(trace, timeline))


def test_every_category_has_a_colour_of_its_own():
    assert set(palette.COLOURS) == set(Category)
    assert len({*palette.COLOURS.values(), palette.CACHED}) == len(Category) + 1
    assert palette.colour("loss") == palette.colour(Category.LOSS)


def test_the_style_is_the_figures_own(trace):
    before = dict(matplotlib.rcParams)
    figure = figures.allocator_trace(trace, [mark for mark in trace.marks if mark.step == 2])
    assert dict(matplotlib.rcParams) == before
    assert not figure.axes[0].spines["top"].get_visible()
    assert "matplotlib.pyplot" not in inspect.getsource(drawing)


# --- the segments ---------------------------------------------------------------------------------------------------


def test_the_map_holds_what_the_allocator_held(failed):
    index = next(i for i, event in enumerate(failed.events) if event.action == "oom")
    held = figures.segments_before(failed, index, categorise(failed))
    assert sum(segment.size for segment in held) == failed.reserved_bytes()[index]
    used = sum(s.size for segment in held for s in segment.stretches if s.category is not None)
    assert used == failed.allocated_bytes()[index]
    for segment in held:
        assert segment.stretches[0].offset == 0
        assert all(a.offset + a.size == b.offset for a, b in pairwise(segment.stretches))
        assert segment.stretches[-1].offset + segment.stretches[-1].size == segment.size


def test_holes_are_those_of_the_allocator_itself():
    with SimulatedGpu("A40", torch="2.5.1") as card:
        Training(TINY, watch=card.watch).step(1)
        trace, segments = card.trace(), card.allocator.segments()
    held = figures.segments_before(trace, len(trace), categorise(trace))
    assert [(segment.address, segment.size) for segment in held] == [(s.address, s.total_bytes) for s in segments]
    for ours, theirs in zip(held, segments, strict=True):
        holes = {(s.offset + ours.address, s.size) for s in ours.stretches if s.category is None}
        assert holes == {(address, size) for address, size, _, state in theirs.blocks if state == "inactive"}


def test_expandable_segments_are_one_stretch_of_pages(trace):
    grown = stepped(TINY, allocator_conf="expandable_segments:True")
    held = figures.segments_before(grown, len(grown), categorise(grown))
    assert sum(segment.size for segment in held) == grown.reserved_bytes()[-1]
    index = grown.peak({2})
    assert "fit into a hole" in figures.alt(figures.segment_map(grown, categorise(grown), index=index))


def test_pages_come_and_go():
    page = 2 * MIB
    events = [Event("segment_map", page * n, page, page) for n in (0, 1, 2)]
    events.append(Event("segment_unmap", page, page, page))
    assert figures.segments._ranges(Trace(events), 3) == [(0, 3 * page)]
    assert figures.segments._ranges(Trace(events), 4) == [(0, page), (2 * page, page)]


def test_without_a_failure_the_map_wants_to_know_the_moment(trace):
    with pytest.raises(ValueError, match="no request of this trace failed"):
        figures.segment_map(trace, categorise(trace))


# --- labels ---------------------------------------------------------------------------------------------------------


def test_spread_keeps_its_distance_and_moves_little():
    rows = labels.spread([1, 1.1, 1.2, 8], 1, 0, 10)
    assert all(b - a >= 1 - 1e-9 for a, b in pairwise(rows)) and rows[3] == 8
    assert np.isclose(np.mean(rows[:3]), 1.1)
    assert labels.spread([9, 9, 9], 1, 0, 10) == [8, 9, 10] and len(labels.spread([5] * 30, 1, 0, 10)) == 30


def test_kinds_of_numbers_have_marks_also_with_a_card():
    assert labels.marker("recorded, H200") == labels.marker("measured") != labels.marker("predicted A40")


def test_numbers_as_people_write_them():
    assert palette.mib(1_646_821_376) == "1,570.5 MiB" and palette.mib(-MIB, 1, sign=True) == "−1.0 MiB"
    assert palette.number(0.0, 1, sign=True) == "0.0" and palette.size(512) == "512 B"
    assert palette.ink_on("#004B87") == "#FFFFFF" and palette.ink_on("#FFD287") == palette.INK
