"""The figures of the stream: no text on another, the finding in words, the same bytes twice."""

from itertools import combinations

import pandas as pd
import pytest
from test_figures import overlap, texts

from gpt2.study import figures
from gpt2.study.figures import stream
from gpt2.study.results import save_figure

CAPTION = "GPT-2 124M, batch 8 x 1,024, bf16, AdamW foreach · torch 2.11.0 · recorded on NVIDIA H200 on 2026-11-29"


def _kinds(scale: float) -> pd.DataFrame:
    shares = {"matrix product": 60, "element-wise": 25, "softmax": 6, "attention": 9, "layer norm": 2, "embedding": 0.4}
    rows = [(kind, phase, scale * ms * part, 40) for kind, ms in shares.items()
            for phase, part in (("forward", 0.3), ("backward", 0.6), ("optimizer", 0.1))]
    return pd.DataFrame(rows, columns=["kind", "phase", "busy_ms", "kernel_count"])


def _strip(gap: float) -> pd.DataFrame:
    rows = [("device", step, phase, step * (30 + gap) + i * 0.3, 0.28) for step in (1, 2, 3)
            for i, phase in enumerate(["forward"] * 30 + ["backward"] * 60 + ["optimizer"] * 9)]
    return pd.DataFrame(rows, columns=["lane", "step", "phase", "start_ms", "duration_ms"])


def drawn(name: str):
    steps = pd.DataFrame({"step": range(1, 13), "host_ms": [9.0 * n for n in range(1, 13)],
                          "device_ms": [26.0 * n for n in range(1, 13)]})
    habits = ["loss.item() once a step", "batch from pageable memory, blocking", "item() after each module"]
    waits = pd.DataFrame([(recipe, habit, 0.04 * (i + 1) * (j + 1) ** 2 - 0.01)
                          for i, recipe in enumerate(("fp32", "bf16", "bf16, 1")) for j, habit in enumerate(habits)],
                         columns=["recipe", "says", "added_ratio"])
    updates = pd.DataFrame([(m, i, r, b) for m in ("124M", "1.3B") for i, r, b in (
        ("fused", 4.1, 28), ("foreach", 3.9, 80), ("loop", 0.8, 80))],
        columns=["model", "implementation", "rate", "bytes_each"])
    arguments = {"by_kind": ({"fp32": _kinds(2.0), "bf16, fused attention": _kinds(0.4)},), "waiting": (waits,),
                 "lead": ({"fp32": steps, "bf16-sdpa": steps},), "rates": (updates, 4.2),
                 "late_loader": ({"prompt": _strip(1), "20 ms late": _strip(21)},)}
    return getattr(stream, name)(*arguments[name], subtitle=CAPTION)


every = pytest.mark.parametrize("name", ["by_kind", "lead", "waiting", "late_loader", "rates"])


@every
def test_no_text_covers_another_or_leaves_the_canvas(name):
    figure = drawn(name)
    written, canvas = texts(figure), figure.bbox
    assert not [t for t, box in written if box.x0 < 0 or box.y0 < 0 or box.x1 > canvas.x1 or box.y1 > canvas.y1]
    assert not [(a[0], b[0]) for a, b in combinations(written, 2) if overlap(a[1], b[1]) > 2]


@every
def test_alt_text_and_bytes(name, tmp_path, monkeypatch):
    monkeypatch.setenv("STUDY_OUT", str(tmp_path))
    pictures = [save_figure(f := drawn(name), name, figures.alt(f)) for _ in range(2)]
    assert pictures[0].png == pictures[1].png
    assert any(sign.isdigit() for sign in pictures[0].alt.partition(". ")[0]) and "nan" not in pictures[0].alt


def test_a_gap_is_from_the_last_kernel_of_a_step_to_the_first_of_the_next():
    gaps = stream._holes(_strip(20))
    assert len(gaps) == 2 and gaps[0][1] - gaps[0][0] == pytest.approx(50 - 98 * 0.3 - 0.28)
