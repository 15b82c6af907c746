"""The command line: the contract of `predict --json` to the letter, published peaks, and one line for bad input."""

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpt2.cli import main
from gpt2.memory.fit import Trial, search

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
A40 = ("--gpu", "A40", "--torch", "2.5.1")
TINY = ("--gpu", "A40", "--model", "tiny", "--batch", "2")
TRACES = ROOT / "results" / "measured" / "h200" / "traces"


@pytest.fixture
def ask(capsys):
    """Runs a command in this process; gives its JSON."""

    def run(*words: str) -> dict:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def command(*words: str, **more) -> subprocess.CompletedProcess:
    """`python -m gpt2 words...` in a process of its own."""
    return subprocess.run([sys.executable, "-m", "gpt2", *words], capture_output=True, text=True, cwd=ROOT, **more)


# --- predict ----------------------------------------------------------------------------------------------------------


def test_keys_and_types(ask):
    found = ask("predict", *TINY)
    assert list(found) == ["kind", "gpu", "torch", "recipe", "backend", "alloc_conf", "limit_mib", "steps", "fits",
                           "peak_allocated_bytes", "peak_reserved_bytes", "per_step", "peak", "ledger", "out_of_memory"]
    assert (found["kind"], found["gpu"], found["fits"], found["out_of_memory"]) == ("predicted", "A40", True, None)
    assert found["recipe"]["model"] == "tiny" and found["recipe"]["length"] == 16
    assert [row["step"] for row in found["per_step"]] == [1, 2, 3]
    for row in found["per_step"]:
        assert list(row) == ["step", "peak_allocated_bytes", "peak_reserved_bytes"]
        assert all(isinstance(value, int) for value in row.values())
    assert list(found["peak"]) == ["step", "phase", "module", "operator", "requested_bytes"]
    assert [type(value) for value in found["peak"].values()] == [int, str, str, str, int]
    later = found["per_step"][1:]
    assert found["peak_allocated_bytes"] == max(row["peak_allocated_bytes"] for row in later)
    assert found["peak_reserved_bytes"] == max(row["peak_reserved_bytes"] for row in later)


def test_what_was_asked_is_in_the_answer(ask):
    asked = ("backend", "alloc_conf", "limit_mib", "steps")
    words = "--attention sdpa --backend math --alloc-conf expandable_segments:True --limit-mib 64".split()
    for name, steps in (("predict", 3), ("fit", 20)):  # with expandable segments, fit looks for longer
        assert [ask(name, *TINY)[key] for key in asked] == ["auto", "", None, 3]
        assert [ask(name, *TINY, *words)[key] for key in asked] == ["math", "expandable_segments:True", 64, steps]
        assert ask(name, *TINY, "--steps", "2")["steps"] == 2


def test_the_first_step_is_not_the_peak(ask):
    found = ask("predict", *TINY, "--width", "512", "--vocabulary", "5000")
    first, second, _ = (row["peak_allocated_bytes"] for row in found["per_step"])
    assert first > second == found["peak_allocated_bytes"] and found["peak"]["step"] == 2


def test_installed_torch_is_the_default(ask):
    import torch

    assert {ask(name, *TINY, "--limit-mib", "64")["torch"] for name in ("predict", "fit")} == {
        torch.__version__.partition("+")[0]}


@pytest.mark.parametrize(("batch", "allocated", "reserved"), [
    (8, 17_054, None), (16, 32_611, 36_072), (18, 36_489, 40_504), (20, 40_375, 44_948)])
def test_published_peaks_of_the_a40(ask, batch, allocated, reserved):
    found = ask("predict", *A40, "--batch", str(batch))
    assert found["fits"]
    assert round(found["peak_allocated_bytes"] / MIB) == allocated
    assert reserved is None or abs(found["peak_reserved_bytes"] / MIB - reserved) <= 2
    assert sum(row["bytes"] for row in found["ledger"]) == found["peak_allocated_bytes"]
    assert "allocator slack" in [row["category"] for row in found["ledger"]]
    if batch == 8:
        assert (found["peak"]["operator"], found["peak"]["requested_bytes"], found["peak"]["phase"]) == (
            "aten._log_softmax_backward_data", 1_646_821_376, "backward")


def test_batch_21_runs_out_in_step_2(ask):
    found = ask("predict", *A40, "--batch", "21")
    assert not found["fits"]
    assert list(found["out_of_memory"]) == ["step", "phase", "module", "operator", "requested_bytes"]
    assert found["out_of_memory"]["step"] == 2
    assert f"{found['out_of_memory']['requested_bytes'] / MIB:,.1f}" == "4,122.6"
    assert [row["step"] for row in found["per_step"]] == [1, 2]
    assert sum(row["bytes"] for row in found["ledger"]) == found["peak_allocated_bytes"]


def test_the_peak_of_a_run_that_failed_is_that_of_the_whole_run(ask, capsys):
    """Step 1 of batch 21 reached more than step 2, in which it died; the table of the sweep says so too."""
    from gpt2.study import results

    sweep = results.load_table(ROOT / "results" / "predicted" / "a40" / "04-sweep.csv").set_index("batch").loc[21]
    sweep = [int(sweep[f"peak_{name}_bytes"]) for name in ("allocated", "reserved")]
    options = (*A40, "--batch", "21", "--limit-mib", "45440")
    found = ask("predict", *options)
    assert [found["peak_allocated_bytes"], found["peak_reserved_bytes"]] == sweep
    assert found["peak"]["step"] == 1 and sum(row["bytes"] for row in found["ledger"]) == sweep[0]
    tried = next(row for row in ask("fit", *options)["tried"] if row["batch"] == 21)
    assert [tried["peak_allocated_bytes"], tried["peak_reserved_bytes"]] == sweep
    for name in ("predict", "fit"):
        assert main([name, *options]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines()
                    if re.match(r"  (allocated|21 )", line))
        assert f"{sweep[0] / MIB:,.2f} MiB" in line


def test_a_run_that_never_reaches_a_second_step_answers_for_what_there_is(ask):
    one = ask("predict", *TINY, "--steps", "1")
    assert one["peak_allocated_bytes"] == one["per_step"][0]["peak_allocated_bytes"]
    none = ask("predict", "--gpu", "A40", "--limit-mib", "100")
    assert not none["fits"] and none["out_of_memory"]["step"] == 0
    assert none["per_step"][0]["step"] == 0 and none["peak_reserved_bytes"] <= 100 * MIB


def test_another_size_than_the_models(ask):
    small = ask("predict", *TINY)
    wide = ask("predict", *TINY, "--width", "64", "--layers", "4")
    assert wide["recipe"]["model"] == "tiny-layers4-width64"
    assert wide["peak_allocated_bytes"] > small["peak_allocated_bytes"]


@pytest.mark.parametrize("option", [
    ("--precision", "bf16"), ("--attention", "sdpa"), ("--checkpoint", "block"), ("--checkpoint", "every-2"),
    ("--loss", "chunked"), ("--optimizer", "fused"), ("--optimizer", "loop"), ("--accumulate", "2"), ("--clip", "1.0"),
    ("--dropout", "0.1"), ("--moments", "bf16"), ("--step-in-backward",), ("--drop-logits",), ("--keep-gradients",),
    ("--alloc-conf", "expandable_segments:True"), ("--limit-mib", "64"), ("--loss", "chunked", "--loss-chunks", "2"),
    ("--attention", "sdpa", "--backend", "math"), ("--steps", "2")])
def test_every_option_is_predicted(ask, option):
    found = ask("predict", *TINY, *option)
    assert found["fits"] and sum(row["bytes"] for row in found["ledger"]) == found["peak_allocated_bytes"]


def test_advice_for_people_has_a_line_for_each_price(capsys):
    assert main(["predict", "--gpu", "A40", "--batch", "1", "--limit-mib", "600", "--advise"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "Nothing makes this step fit; everything at once" in lines
    assert "--checkpoint block: 24 % more time" in lines and lines[-1].startswith("Times are of each change alone")
    assert not any(line.startswith("The order") for line in lines)


def test_advice_for_people_says_what_order_it_is(capsys):
    assert main(["predict", *TINY, "--vocabulary", "50257", "--batch", "64", "--limit-mib", "700", "--advise"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "What makes this step fit, cheapest first" in lines
    assert len([line for line in lines if line.startswith("The order") and "time saved counts as none" in line]) == 1


def test_table_for_people(capsys):
    assert main(["predict", *A40, "--batch", "21"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("predicted for A40, torch 2.5.1")
    assert "does not fit" in text and "4,122.64 MiB" in text and "step 2" in text and "allocator slack" in text
    assert "MB" not in text.replace("MiB", "")


# --- bad input --------------------------------------------------------------------------------------------------------

BAD = {
    "--batch 0": "at least 1", "--batch -3": "at least 1", "--batch two": "not a whole number",
    "--batch 1.5": "not a whole number", "--length 0": "at least 1", "--length 1025": "above the context",
    "--heads 7": "not divisible by 7 heads", "--width 100": "not divisible by 12 heads",
    "--gpu A41": "known: T4, A40, A100, H100, H200, RTX 4090", "--model 125M": "known: tiny, 124M",
    "--precision fp8": "fp32, bf16", "--attention flash": "explicit, sdpa", "--checkpoint every-0": "none, block",
    "--loss half": "full, chunked", "--optimizer lion": "foreach, fused, loop", "--moments fp8": "fp32, bf16",
    "--clip -1": "clip must be at least 0", "--clip nan": "not a number", "--dropout 1": "dropout must be",
    "--accumulate 0": "at least 1", "--steps 0": "at least 1", "--limit-mib 0": "at least 1",
    "--limit-mib 1": "smallest segment", "--alloc-conf expand:True": "unknown allocator option 'expand'",
    "--alloc-conf expandable_segments": "option:value", "--alloc-conf max_split_size_mb:1": "max_split_size_mb",
    "--torch 2.4.1": "not a release from 2.5 on", "--torch new": "not a release", "--batch 10000000": "token ids alone",
    "--step-in-backward --clip 1": "step_in_backward", "--nonsense": "unrecognized arguments",
    "--loss-chunks 0": "at least 1", "--loss-chunks 4": "needs --loss chunked",
    "--loss chunked --loss-chunks 8193": "above the 8,192 tokens", "--limit-mib -1": "at least 1",
    "--limit-mib 45630": "above the 45,629 MiB", "--checkpoint every-": "none, block", "--layers 1001": "at most 1,000",
    "--steps 1001": "at most 1,000", "--accumulate 1001": "at most 1,000", "--width 16777217": "at most 16,777,216",
    "--vocabulary 99999999999999999999": "at most", "--context 99999999999": "at most", "--heads 1e3": "not a whole",
    "--step-in-backward --accumulate 2": "step_in_backward", "--step-in-backward --precision fp16": "step_in_backward",
    "--alloc-conf expandable_segments=True": "option:value", "--alloc-conf expandable_segment:True": "unknown",
    "--alloc-conf roundup_power2_divisions:[1:2": "nothing closes", "--clip inf": "not a number",
    "--backend magic": "auto, flash, efficient, cudnn, math", "--backend flash": "needs --attention sdpa",
    "--attention sdpa --backend flash": "does not run in fp32 on this card: No available kernel",
    "--attention sdpa --backend cudnn": "does not run in fp32 on this card: No available kernel",
}


def one_line(words: list[str], said: str, capsys) -> None:
    """The command ends with 2 and says this in a single line, on standard error alone."""
    try:
        status = main(words)
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("error: ") and said in err


@pytest.mark.parametrize("options", BAD)
def test_bad_options_are_one_line(options, capsys):
    one_line(["predict", *([] if "--gpu" in options else ["--gpu", "A40"]), *options.split()], BAD[options], capsys)


@pytest.mark.parametrize(("words", "said"), [
    ([], "command"), (["dance"], "invalid choice"), (["predict"], "--gpu is missing"), (["fit"], "--gpu is missing"),
    (["fit", "--gpu", "A40", "--what", "width"], "batch, length"), (["record"], "no GPU here; use predict"),
    (["record", "--batch", "0"], "at least 1"), (["record", "--alloc-conf", "x:1"], "unknown allocator option"),
    (["diff", "nothing", "nowhere"], "nothing"), (["snapshot", "nothing"], "cannot read nothing"),
    (["snapshot", __file__], "pickle"), (["explain", "hello"], "not an out-of-memory message"),
    (["explain", "Tried to allocate 2.00 GiB", "--batch", "0"], "at least 1"),
    (["fit", "--gpu", "A40", "--what", "length", "--length", "1025"], "above the context"),
    (["fit", "--gpu", "A40", "--attention", "sdpa", "--backend", "flash"], "No available kernel"),
    (["fit", "--gpu", "T4", "--attention", "sdpa", "--backend", "flash", "--precision", "fp16"], "No available kernel"),
    (["record", "--attention", "sdpa", "--backend", "magic"], "no GPU here; use predict"),
    (["snapshot", "x", "--gpu", "A40", "--limit-mib", "1"], "cannot read x"),
    (["simulate", "--gpu", "A40"], "no script"), (["simulate", "--gpu", "A40", "nothing.py"], "no such script"),
    (["simulate", "--gpu", "A40", "-m", "nothing.at.all"], "no module named"),
    (["simulate", "x.py"], "--gpu is missing"), (["simulate", "--gpu", "Z9", "x.py"], "unknown GPU")])
def test_bad_commands_are_one_line(words, said, capsys):
    one_line(words, said, capsys)


@pytest.mark.parametrize(("right", "wrong"), [("clip", "--dropout 1.5"), ("dropout", "--clip -1")])
def test_only_the_option_that_is_wrong_is_named(right, wrong, capsys):
    assert main(["predict", "--gpu", "A40", *wrong.split()]) == 2
    error = capsys.readouterr().err
    assert wrong.split()[0][2:] in error and wrong.split()[1] in error and right not in error


def test_a_release_nobody_knows_yet_follows_the_newest_known(ask, capsys):
    for name in ("predict", "fit"):
        assert main([name, *TINY, "--torch", "2.99", "--json"]) == 0
        out, err = capsys.readouterr()
        assert err.count("\n") == 1 and err.startswith("note: ") and "2.99" in err and "2.14.1" in err
        assert json.loads(out)["torch"] == "2.99"
    assert main(["predict", *TINY, "--torch", "2.14.9", "--json"]) == 0 and capsys.readouterr().err == ""


def test_corrupt_files_are_one_line(tmp_path, capsys):
    whole = (TRACES / "base.json.gz").read_bytes()
    files = {"cut.json.gz": whole[:1000], "empty": b"", "hostile.pickle": b"cos\nsystem\n(S'true'\ntR."}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        one_line(["snapshot", str(tmp_path / name)], name, capsys)
        one_line(["diff", str(tmp_path / name), str(tmp_path / name)], name, capsys)


def test_no_traceback_and_status_2_from_the_shell():
    done = command("predict", "--gpu", "A40", "--heads", "5")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: width 768 is not divisible by 5 heads\n")


# --- start-up ---------------------------------------------------------------------------------------------------------


def test_help_needs_no_torch():
    code = "import sys, gpt2.cli as cli\ntry: cli.main(['predict', '--help'])\nexcept SystemExit: pass\n"
    code += "assert cli.main(['gpus']) == 0 and not {'torch', 'pandas'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


def test_a_closed_pipe_is_no_error():
    shell = f"{sys.executable} -m gpt2 gpus --json | head -c 10"
    done = subprocess.run(shell, shell=True, cwd=ROOT, capture_output=True)
    assert done.stderr == b""


# --- fit --------------------------------------------------------------------------------------------------------------


def test_largest_batch_of_the_a40(ask):
    ask("predict", *A40)  # what a process does once is not part of the search
    started = time.process_time()
    found = ask("fit", *A40)
    assert time.process_time() - started < 5
    assert found["largest_batch"] == 20
    tried = {row["batch"]: row for row in found["tried"]}
    assert tried[20]["fits"] and not tried[21]["fits"] and len(tried) <= 5
    assert list(tried[20]) == ["batch", "fits", "peak_allocated_bytes", "peak_reserved_bytes", "steps"]
    assert {row["steps"] for row in tried.values()} == {3}
    assert round(tried[20]["peak_allocated_bytes"] / MIB) == 40_375
    assert (found["next"]["batch"], found["next"]["step"]) == (21, 2)
    assert f"{found['next']['requested_bytes'] / MIB:,.1f}" == "4,122.6"


def test_largest_length_is_tried_on_both_sides(ask):
    size = ("--context", "512", "--length", "512", "--limit-mib", "30", "--steps", "2")
    found = ask("fit", "--what", "length", *TINY, *size)
    tried = {row["length"]: row["fits"] for row in found["tried"]}
    best = found["largest_length"]
    assert tried[best] and not tried[best + 1] and found["next"]["length"] == best + 1


def test_the_context_is_the_end_and_nothing_is_next(ask):
    found = ask("fit", "--what", "length", *TINY)
    assert (found["largest_length"], found["next"]) == (16, None)


def test_not_even_one_fits(ask):
    found = ask("fit", "--gpu", "A40", "--limit-mib", "200")
    assert found["largest_batch"] == 0 and found["next"]["batch"] == 1


@pytest.mark.parametrize(("most", "first"), [(500, 8), (500, 500), (40, 1), (100_000, 8)])
@pytest.mark.parametrize("power", [1, 2])
def test_search_finds_the_boundary_with_few_trials(most, first, power):
    def attempt(number: int) -> Trial:
        size = 1000 + 90 * number ** power + (7 * number) % 13
        return Trial(number, size <= 50_000, size, size, 1000)

    found = search(attempt, 50_000, first=first, most=most, power=power)
    fits = [n for n in range(1, most + 1) if attempt(n).fits]
    assert found.largest == len(fits)
    assert len(found.tried) <= 12
    assert (found.next is None) == (found.largest == most)


def test_advice_fits_and_comes_cheapest_first(ask):
    step = ("predict", *TINY, "--vocabulary", "50257", "--batch", "64", "--limit-mib", "700")
    found = ask(*step, "--advise")
    assert not found["fits"] and found["advice"]
    for row in found["advice"]:
        assert list(row) == ["changes", "price", "fits", "peak_allocated_bytes", "peak_reserved_bytes"]
        assert row["fits"] and row["peak_reserved_bytes"] <= 700 * MIB
        assert ask(*step, *row["changes"].split())["fits"]


# --- files and messages -----------------------------------------------------------------------------------------------


def test_diff_of_a_trace_with_itself_and_with_another(ask):
    one, other = str(TRACES / "length-256.json.gz"), str(TRACES / "batch-1.json.gz")
    same = ask("diff", one, one)
    assert same["identical"] and same["index"] is None
    apart = ask("diff", one, other)
    assert not apart["identical"] and apart["index"] >= 0 and (apart["only_left"] or apart["only_right"])


def test_explain_from_standard_input():
    done = command("explain", "-", "--json", input="CUDA out of memory. Tried to allocate 394.00 MiB. GPU 0 has ...")
    assert done.returncode == 0 and json.loads(done.stdout)["message"]["requested"] == "394.00 MiB"


def test_explain_reads_a_file(ask, tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_bytes(b"epoch 1 \xff\nCUDA out of memory. Tried to allocate 394.00 MiB. GPU 0 has ...\n")
    assert ask("explain", str(log))["message"]["requested"] == "394.00 MiB"
    one_line(["explain", str(tmp_path)], "is a directory", capsys)
    log.write_text("")
    one_line(["explain", str(log)], "train.log is empty", capsys)


def test_explain_of_an_empty_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    one_line(["explain", "-"], "standard input is empty", capsys)


def test_gpus_are_listed_with_their_sources(ask):
    cards = ask("gpus")
    assert [card["name"] for card in cards] == ["T4", "A40", "A100", "H100", "H200", "RTX 4090"]
    assert all(card["source"] and card["memory_bytes"] >= card["free_bytes_at_start"] for card in cards)


def test_environment_does_not_change_a_prediction(ask, monkeypatch):
    before = ask("predict", *TINY)
    monkeypatch.setitem(os.environ, "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert ask("predict", *TINY) == before
