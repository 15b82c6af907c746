"""Out-of-memory messages: every wording since 1.0, and reference cases 4 and 26 to 30."""

import json
from pathlib import Path

import pytest

from gpt2.memory.caching.out_of_memory import OutOfMemory, format_size
from gpt2.memory.explain import explain
from gpt2.memory.explaining.candidates import candidates, segment_of
from gpt2.memory.explaining.oom_message import read
from gpt2.memory.explaining.progress import block_bytes, parameter_count
from gpt2.memory.trace import Trace
from gpt2.model import SIZES, size

MiB, GiB = 2**20, 2**30
GPT2 = size("124M")


def old(requested, allocated="14.75 GiB", free="8.00 MiB", reserved="14.80 GiB", allowed=""):
    return (f"RuntimeError: CUDA out of memory. Tried to allocate {requested} (GPU 0; 15.78 GiB total capacity; "
            f"{allocated} already allocated; {free} free; {allowed}{reserved} reserved in total by PyTorch) If "
            "reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See "
            "documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF")


def new(requested, total="44.38 GiB", free="8.00 MiB", processes="", allocated="37.00 GiB", private="",
        idle="100.00 MiB"):
    return (f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {requested}. GPU 1 has a total capacity of "
            f"{total} of which {free} is free. {processes}Of the allocated memory {allocated} is allocated by PyTorch, "
            f"{private}and {idle} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
            "try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.")


MESSAGES = {
    "1.0": ("CUDA out of memory. Tried to allocate 1024.00 KiB (GPU 0; 11.17 GiB total capacity; 10.90 GiB already "
            "allocated; 576.00 KiB free; 30.96 MiB cached)",
            dict(requested_bytes=MiB, free_bytes=576 * 1024, unallocated_bytes=round(30.96 * MiB))),
    "1.10": (old("20.00 MiB", free="0 bytes"),
             dict(requested_bytes=20 * MiB, gpu=0, total_bytes=round(15.78 * GiB), free_bytes=0, allowed_bytes=None,
                  allocated_bytes=round(14.75 * GiB), reserved_bytes=round(14.80 * GiB))),
    "1.13 with a limit": (old("20.00 MiB", free="6.00 GiB", allowed="9.00 GiB allowed; "), dict(allowed_bytes=9 * GiB)),
    "2.1": ("CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a total capacty of 4.00 GiB of which 41.56 MiB "
            "is free. Including non-PyTorch memory, this process has 3.44 GiB memory in use. Of the allocated memory "
            "2.58 GiB is allocated by PyTorch, and 1.90 MiB is reserved by PyTorch but unallocated.",
            dict(total_bytes=4 * GiB, this_process_bytes=round(3.44 * GiB), unallocated_bytes=round(1.90 * MiB),
                 reserved_bytes=round(2.58 * GiB) + round(1.90 * MiB))),
    "2.5": (new("1.95 GiB", processes="Process 2493055 has 12.02 GiB memory in use. Including non-PyTorch memory, this "
                                      "process has 966.00 MiB memory in use. "),
            dict(gpu=1, processes=((2493055, round(12.02 * GiB)),), this_process_bytes=966 * MiB)),
    "2.9 with graphs": (new("46.00 MiB", private="with 24.00 MiB allocated in private pools (e.g., CUDA Graphs), "),
                        dict(private_bytes=24 * MiB, allocated_bytes=37 * GiB)),
    "WSL": (new("3.98 GiB", processes="Including non-PyTorch memory, this process has 17179869184.00 GiB memory in "
                                    "use. "),
            dict(this_process_bytes=None)),
    "HIP": ("HIP out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 255.69 GiB of which 252.82 "
            "GiB is free. 1.20 GiB allowed; Of the allocated memory 1.14 GiB is allocated by PyTorch, with 17.00 MiB "
            "allocated in private pools (e.g., HIP Graphs), and 18.63 MiB is reserved by PyTorch but unallocated.",
            dict(backend="HIP", allowed_bytes=round(1.20 * GiB))),
    "1EB": ("CUDA out of memory. Tried to allocate more than 1EB memory.", dict(requested_bytes=2**60)),
    "cudaMallocAsync": ("Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     "
                        ": 1.00 GiB\nRequested               : 2.00 GiB\nDevice limit            : 4.00 GiB\nFree "
                        "(according to CUDA): 0 bytes\nPyTorch limit (set by user-supplied memory fraction)\n      : "
                        "3.50 GiB",
                        dict(source="cudaMallocAsync", requested_bytes=2 * GiB, total_bytes=4 * GiB, free_bytes=0,
                             allocated_bytes=GiB, allowed_bytes=round(3.5 * GiB))),
    "cuBLAS": ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
               dict(source="cuBLAS", requested_bytes=None)),
    "cuDNN": ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", dict(source="cuDNN")),
    "driver": ("torch.AcceleratorError: CUDA error: out of memory", dict(source="driver")),
    "cut short": ("torch.OutOfMemoryError: CUDA out of memory.", dict(source="allocator", requested_bytes=None)),
}


@pytest.mark.parametrize("version", MESSAGES)
def test_every_wording_is_read(version):
    text, expected = MESSAGES[version]
    got = read(text)
    assert {name: getattr(got, name) for name in expected} == expected
    explained = explain(text)
    assert explained.advice
    assert json.loads(explained.to_json())["cause"] == explained.cause


def test_a_message_is_found_in_a_wrapped_log_and_repeats_are_counted():
    text = "step 3\n" + old("786.00 MiB").replace("GPU 0; ", "GPU 0;\n    ") + "\nretry\n" + old("2.00 MiB")
    assert (read(text).requested, read(text).repeats, read(text).total_bytes) == ("786.00 MiB", 2, round(15.78 * GiB))


def test_the_message_our_own_allocator_raises_is_read_back():
    error = OutOfMemory(3 * MiB, 3 * MiB, 20 * MiB, 12 * GiB, 13 * GiB, 8 * MiB, 14 * GiB, 13 * GiB, torch="2.5.1")
    got = read(str(error))
    assert (got.requested_bytes, got.allocated_bytes, got.reserved_bytes) == (20 * MiB, 12 * GiB, 13 * GiB)
    assert (got.free_bytes, got.total_bytes, got.allowed_bytes) == (8 * MiB, 14 * GiB, 13 * GiB)


HOST = ("RuntimeError: [enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 8 bytes.")
LONG = ["x" * 100_000, "9" * 200_000, "out of memory " * 20_000,
        "Allocation on device 0 would exceed allowed memory " * 5_000]


@pytest.mark.parametrize("text", ["", "   ", "KeyError: 'wte'", "out of memory", "Killed", HOST, *LONG],
                         ids=lambda text: text[:12])
def test_anything_else_is_refused_in_one_clear_line(text):
    with pytest.raises(ValueError, match="out-of-memory message|host's memory") as refused:
        explain(text)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


@pytest.mark.parametrize("wrong", [dict(batch=0), dict(length=-1), dict(vocabulary=0), dict(model="9B")])
def test_impossible_facts_are_refused(wrong):
    with pytest.raises(ValueError):
        explain(old("2.00 MiB"), **wrong)


def loss_tensors(requested, vocabulary):
    found = candidates(requested, GPT2, vocabularies=(vocabulary,))
    return {(c.batch, c.dtype) for c in found if c.kind == "loss" and c.length == 1024 and c.batch <= 64}


def test_case_26_logits_by_size_and_vocabulary():
    half = "bfloat16 or float16"
    assert loss_tensors("394.00 MiB", 50_304) == {(2, "float32"), (4, half)}
    assert loss_tensors("6.14 GiB", 50_304) == {(32, "float32"), (64, half)}
    assert loss_tensors("786.00 MiB", 50_304) == {(4, "float32"), (8, half)}
    assert loss_tensors("786.00 MiB", 50_257) == {(4, "float32"), (8, half)}
    assert loss_tensors("198.00 MiB", 50_257) == {(1, "float32"), (2, half)}
    assert explain(old("394.00 MiB")).candidates[0].kind == "loss"
    assert explain(old("394.00 MiB")).blocks_done == 12


def test_case_27_one_hidden_tensor_and_no_smaller_batch():
    told = explain(old("12.00 MiB"), batch=1)
    assert told.candidates[0][:6] == ("MLP hidden layer (before or after GELU, or a gradient)", "activation", "B·T·4D",
                                      "float32", 1, 1024)
    assert told.candidates[0].bytes == 1 * 1024 * 3072 * 4
    assert not any("batch" in a for a in told.advice)
    assert any("Lower the batch of 4" in a for a in explain(old("12.00 MiB"), batch=4).advice)


def test_case_28_a_score_matrix_after_nine_blocks():
    told = explain(old("384.00 MiB", free="100.00 MiB"))
    first = told.candidates[0]
    assert (first.kind, first.batch, first.bytes) == ("scores", 8, 8 * 12 * 1024**2 * 4)
    assert told.blocks_done == 9
    assert "9 blocks done" in told.text()
    assert "scaled_dot_product_attention" in told.advice[0]


def test_case_29_free_memory_larger_than_the_request_is_not_a_matter_of_size():
    told = explain(old("2.26 GiB", allocated="781.59 MiB", free="3.03 GiB", reserved="1.24 GiB"))
    assert told.cause == "outside this allocator"
    assert "look outside this allocator" in told.text()
    assert not any("batch" in a or "Checkpoint" in a for a in told.advice)
    limited = explain(old("2.26 GiB", free="6.00 GiB", allowed="9.00 GiB allowed; "))
    assert limited.cause == "limit" and "9.00 GiB" in limited.advice[0]


def test_the_messages_of_the_recorded_sweep_are_explained_as_the_sweep_shows():
    """Batches 21 and 22 under a limit of 45,440 MiB: they fail at the logits, and run with expandable segments."""
    folder = Path(__file__).parent.parent / "results" / "measured" / "h200" / "traces"
    for batch in (21, 22):
        trace = Trace.load(folder / f"sweep-{batch}.json.gz")
        told = explain(trace.meta["out_of_memory"]["message"])
        assert told.cause == "limit" and told.message.allowed_bytes == pytest.approx(45_440 * MiB, rel=1e-3)
        assert (told.candidates[0].kind, told.candidates[0].batch) == ("loss", batch)
        assert told.candidates[0].bytes == trace.meta["out_of_memory"]["requested_bytes"]
        assert "expandable_segments:True" in told.advice[1] and "chunks" in told.advice[2]
        assert told.blocks_done == 12


def test_case_30_the_message_prints_the_segment():
    assert [segment_of(n) for n in (1, MiB, MiB + 1, 10 * MiB - 512, 10 * MiB, 10 * MiB + 1)] == [
        2 * MiB, 2 * MiB, 20 * MiB, 20 * MiB, 10 * MiB, 12 * MiB]
    assert "up to 1 MiB" in explain(old("2.00 MiB")).asked
    assert "above 1 MiB and below 10 MiB" in explain(old("20.00 MiB")).asked
    assert all(c.bytes <= MiB for c in explain(old("2.00 MiB")).candidates)


def test_case_4_sizes_are_spelt_in_binary_units():
    assert format_size(81_352_720_384) == "75.77 GiB"
    for text, _ in MESSAGES.values():
        told = explain(text).text()
        assert "GB" not in told and "MB" not in told


def test_fragmentation_names_the_gap_and_the_setting_unless_it_is_on():
    message = new("4.03 GiB", free="500.00 MiB", idle="6.40 GiB", allocated="37.00 GiB",
                  processes="Including non-PyTorch memory, this process has 43.90 GiB memory in use. ")
    told = explain(message)
    assert told.cause == "fragmentation" and "expandable_segments:True" in told.advice[0] and "6.40 GiB" in told.why
    assert told.candidates[0].batch == 21
    already = explain(message, allocator_conf="expandable_segments:True,max_split_size_mb:128")
    assert not any("Set PYTORCH" in a for a in already.advice) and "max_split_size_mb" in already.advice[0]


def test_another_process_is_told_from_our_own_under_another_number():
    other = explain(new("1.95 GiB", total="14.57 GiB", free="1.58 GiB", allocated="734.07 MiB", idle="33.93 MiB",
                        processes="Process 2493055 has 12.02 GiB memory in use. Including non-PyTorch memory, this "
                                  "process has 966.00 MiB memory in use. "))
    assert other.cause == "another process" and "2493055" in other.advice[0]
    container = explain(new("28.00 MiB", total="79.11 GiB", free="5.19 MiB", allocated="76.91 GiB", idle="494.83 MiB",
                            processes="Process 289367 has 79.10 GiB memory in use. "))
    assert container.cause == "size"


def test_what_no_card_can_hold_gets_no_advice_on_settings():
    told = explain(old("56.00 GiB", free="9.51 GiB"))
    assert told.cause == "size" and len(told.advice) == 1 and "shapes" in told.advice[0]


def test_the_closed_forms_agree_with_the_published_model():
    assert parameter_count(GPT2) == 124_439_808
    assert block_bytes(GPT2, 8, 1024) == 769 * MiB
    assert all(candidates("2.00 MiB", s) for s in SIZES.values() if s.width > 32)
