"""The published numbers as data: typed in whole, and the arithmetic between them holds."""

import math

import pytest

from gpt2.memory import formulas
from gpt2.model import size
from gpt2.study.paths import ROOT
from gpt2.study.results import load_table

MIB = 2**20
FOLDER = ROOT / "results" / "published"
TABLES = {
    "00-numbers": ("number", "section", "value", "unit", "description"),
    "01-guesses": ("guess", "question", "guessed", "found", "right"),
    "01-line-by-line": ("line", "step", "change_mib", "why"),
    "01-sixteen-bytes": ("what", "bytes_per_parameter", "size_mib"),
    "02-block-saved": ("tensor", "shape", "tensor_count", "size_mib"),
    "03-details": ("detail", "value", "unit", "description"),
    "03-peak": ("owner", "size_mib", "share_ratio"),
    "04-batch-sweep": ("batch", "fits", "failed_step", "peak_allocated_mib", "peak_reserved_mib"),
    "05-claims": ("claim", "section", "value", "unit", "kind", "description"),
    "08-worked-example": ("line", "value", "unit", "description"),
}


def table(name):
    return load_table(FOLDER / f"{name}.csv")


def values(name):
    rows = table(name)
    return dict(zip(rows.iloc[:, 0], rows.value, strict=True))


@pytest.fixture(scope="module")
def n():
    """Every number of the first article's text, by name."""
    return values("00-numbers")


def test_every_table_is_here_and_named_here():
    assert {path.stem for path in FOLDER.glob("*.csv")} == set(TABLES)


@pytest.mark.parametrize("name, columns", TABLES.items())
def test_a_table_says_where_it_comes_from(name, columns):
    rows = table(name)
    assert tuple(rows.columns) == columns
    assert rows.attrs["kind"] == "published"
    assert rows.attrs["source"].startswith(("Where training memory goes: ", "Anatomy of One GPU Training Step: "))
    if rows.attrs["source"].startswith("Where"):
        assert (rows.attrs["gpu"], rows.attrs["torch"], rows.attrs["cuda"]) == ("A40", "2.5.1", "12.1")
    assert rows.iloc[:, 0].is_unique
    text = (FOLDER / f"{name}.csv").read_bytes()
    assert b"\r" not in text and text.endswith(b"\n")


def test_weights_and_states(n):
    assert n["parameters"] == formulas.parameters(size("124M"))
    assert round(n["parameters"] * 4 / MIB, 1) == n["weights"]
    assert round(n["parameters"] * 8 / MIB, 1) == n["moments"]
    rows = table("01-sixteen-bytes").set_index("what")
    parts = rows.drop("total")
    assert parts.bytes_per_parameter.sum() == rows.bytes_per_parameter["total"] == 16
    assert parts.size_mib.sum() == pytest.approx(rows.size_mib["total"], abs=0.1)
    assert round(n["parameters"] * 16 / MIB, 1) == rows.size_mib["total"]
    assert 16 * 7 == n["states_7b"]
    untied = n["parameters"] + n["vocabulary"] * 768
    assert round(untied, -6) == n["untied_parameters"]
    assert untied / n["parameters"] - 1 == pytest.approx(n["untied_excess"], abs=0.015)


def test_lines_of_the_loop(n):
    change = table("01-line-by-line").set_index("line").change_mib
    assert change["a warm-up matmul"] == pytest.approx(8_519_680 / MIB, abs=0.05)
    rounding = change["model.cuda()"] - n["weights"] - n["masks"]
    assert 0 < rounding < 6
    assert change["first optimizer.step()"] == pytest.approx(n["moments"], abs=2)
    assert change["zero_grad(set_to_none=True)"] == pytest.approx(-n["weights"], abs=2)
    between = change[["a warm-up matmul", "model.cuda()", "first optimizer.step()"]].sum() + 8_519_680 / MIB
    assert round(between) == n["before_forward"]


def test_the_loss_of_a_uniform_guess(n):
    assert round(math.log(n["vocabulary"]), 2) == n["uniform_loss"]
    assert 0 < n["first_loss"] - n["uniform_loss"] < 0.3


def test_a_block(n):
    rows = table("02-block-saved").set_index("tensor")
    assert rows.size_mib.drop("total").sum() == rows.size_mib["total"] == n["calculator_block"]
    for row in rows.drop("total").itertuples():
        each = 1 if "bool" in row.Index else 4
        assert math.prod(map(int, row.shape.split(" x "))) * row.tensor_count * each == row.size_mib * MIB, row.Index
    assert rows.size_mib["attention probabilities"] / rows.size_mib["total"] == pytest.approx(0.5, abs=0.01)


def test_the_forward(n):
    assert n["after_forward"] - n["before_forward"] == n["forward_added"]
    assert n["forward_added"] / n["before_forward"] > n["forward_over_model"]
    assert round(n["blocks"] * n["block_measured"]) == n["blocks_predicted"]
    assert n["activations_predicted"] - n["blocks_predicted"] - n["ends_predicted"] == -1  # each rounded
    assert n["forward_added"] == pytest.approx(n["activations_measured"] + 2 * n["logits"], abs=1)


def test_the_peak(n):
    rows = table("03-peak").set_index("owner")
    parts = rows.drop("total")
    assert parts.size_mib.sum() == rows.size_mib["total"] == n["peak"]
    assert (parts.size_mib / n["peak"]).round(2).tolist() == parts.share_ratio.tolist()
    assert parts.share_ratio.sum() == 1
    assert 1 - parts.share_ratio.iloc[0] == pytest.approx(n["made_share"])
    assert n["peak_request"] == n["tokens"] * n["vocabulary"] * 4
    assert round(n["peak_request"] / MIB, 1) == n["logits"]
    assert round(4 * n["logits"]) == n["vocabulary_tensors"]
    assert n["peak"] - n["hooks_top"] == pytest.approx(2 * n["logits"], abs=1)
    assert n["vocabulary"] * 768 * 4 / MIB == pytest.approx(n["embedding"], abs=0.5)


def test_the_details(n):
    detail = values("03-details")
    assert detail["block_parameters"] == formulas.block_parameters(size("124M"))
    assert round(detail["block_parameters"] * 4 / MIB, 2) == detail["gradient_growth"]
    late = (n["vocabulary"] + 1024) * 768 * 4 / MIB  # token and position embeddings
    assert late == pytest.approx(detail["late_gradient"], abs=0.5)
    parts = ("token_embeddings", "position_embeddings", "embedding_sum")
    assert sum(detail[part] for part in parts) == detail["before_block_1"]
    assert detail["workspace_size"] == formulas.CUBLAS_WORKSPACE_BYTES
    assert 8 * 12 * 1024**2 * 4 / MIB == detail["score_matrix"]
    counted = n["moments"] + n["weights"] + n["masks"] + 2 * 8.125 + detail["slack"]
    assert round(counted) == n["before_forward"]


def test_the_batch_sweep(n):
    rows = table("04-batch-sweep").set_index("batch")
    fitting = rows[rows.fits]
    assert fitting.index.max() == n["largest_batch"] == 20
    assert rows.failed_step[21] == 2
    assert rows[~rows.fits][["peak_allocated_mib", "peak_reserved_mib"]].isna().all(axis=None)
    allocated, reserved = rows.peak_allocated_mib, rows.peak_reserved_mib
    assert (allocated[20] - allocated[16]) / 4 == n["per_sequence_measured"]
    assert (allocated[8] - n["before_forward"]) / 8 == n["per_sequence_predicted"]
    line = (n["free_at_start"] - n["before_forward"]) / n["per_sequence_predicted"]
    assert round(line, 1) == n["straight_line"]
    assert math.floor(line) == n["straight_line_batch"] == n["largest_batch"] + n["batch_missing"]
    assert reserved[20] / allocated[20] - 1 == pytest.approx(n["reserved_over_allocated"], abs=0.005)
    assert n["free_at_start"] - reserved[20] == n["left_at_20"]
    at_21 = (allocated[20] + n["per_sequence_measured"]) * reserved[20] / allocated[20]
    assert at_21 == pytest.approx(n["reserved_21"], abs=150) and at_21 > n["free_at_start"]


def test_the_bugs(n):
    combined = table("02-block-saved").set_index("tensor").size_mib["combined query, key and value"]
    assert n["blocks"] * combined == n["leak"]
    assert round(n["logits"] + 0.01) == n["logits_held"]


def test_the_second_articles_claims():
    rows = table("05-claims")
    claim = values("05-claims")
    assert len(rows) >= 30
    assert set(rows.kind) == {"number", "order", "rough", "given"}
    assert rows[rows.kind == "number"].value.notna().all()
    assert claim["adamw_read"] + claim["adamw_written"] == claim["adamw_traffic"]
    assert round(claim["adamw_traffic"] * 1.3) == claim["adamw_traffic_1_3b"]
    milliseconds = claim["adamw_traffic_1_3b"] / claim["bandwidth"]
    assert milliseconds == pytest.approx(claim["adamw_time_1_3b"], rel=0.1)
    assert 1 + claim["backward_flops"] == claim["step_flops"]


def test_the_worked_example():
    v = values("08-worked-example")
    assert round(12 * v["layers"] * v["width"] ** 2 / 1e9, 1) == v["block_parameters"]
    assert round(v["vocabulary"] * v["width"] / 1e9, 1) == v["embedding_parameters"]
    assert v["block_parameters"] + v["embedding_parameters"] == pytest.approx(v["parameters"])
    assert v["weight_bytes"] + v["moment_bytes"] + v["gradient_bytes"] == v["state_bytes"]
    assert v["state_bytes"] * v["parameters"] == pytest.approx(v["states"], abs=0.5)
    assert round(34 * v["length"] * v["batch"] * v["width"] / 1e9, 2) == v["layer_activations"]
    assert v["layer_activations"] * v["layers"] == pytest.approx(v["activations"], abs=0.5)
    assert round(v["batch"] * v["length"] * v["vocabulary"] / 1e9, 1) == v["logit_count"]
    assert 4 * v["logit_count"] > v["logits"]
    estimate = v["states"] + v["activations"] + v["logits_and_gradient"]
    assert estimate <= v["peak_low"] < v["peak_high"] < v["card"]
    assert v["states"] + 2 * (v["activations"] + v["logits_and_gradient"]) > v["card"]
