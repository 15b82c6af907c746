"""Chrome traces of torch.profiler as timelines: with our labels, without any, of a CPU, and broken ones."""

import gzip
import json

import pandas as pd
import pytest
import torch
from torch.autograd.profiler import record_function

from gpt2.study import timeline

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3>>(int)"


class Writer:
    """Writes a trace as kineto does: calls of the runtime, and the kernels that they launch a little later."""

    def __init__(self):
        self.events, self.device_free, self.number = [], 0.0, 0

    def span(self, name: str, start: float, end: float, cat: str = "user_annotation", tid: int = 1) -> "Writer":
        self.events.append({"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid})
        return self

    def launch(self, name: str, at: float, took: float, cat: str = "kernel", tid: int = 1, late: float = 5.0):
        self.number += 1
        start = max(at + late, self.device_free)
        self.device_free = start + took
        args = {"correlation": self.number}
        self.span("cudaLaunchKernel", at, at + 2.5, "cuda_runtime", tid)
        self.events[-1]["args"] = args
        self.span(name, start, start + took, cat, 7)
        self.events[-1]["args"] = {**args, "stream": 7}
        return self

    def read(self, tmp_path, name: str = "trace.json") -> pd.DataFrame:
        document = {"schemaVersion": 1, "traceEvents": [*self.events, {"ph": "M", "name": "process_name"}]}
        text = json.dumps(document).encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return timeline.read(tmp_path / name)


def anybodys_step() -> Writer:
    """A step that nobody labelled."""
    w = Writer()
    w.launch("Memcpy HtoD (Pinned -> Device)", 1000, 3, "gpu_memcpy")
    w.span("aten::addmm", 1009, 1016, "cpu_op").launch(GEMM, 1010, 40)
    w.span("autograd::engine::evaluate_function: AddmmBackward0", 1020, 1045, "cpu_op", tid=2)
    w.span("aten::mm", 1021, 1030, "cpu_op", tid=2).launch(GEMM, 1022, 45, tid=2).launch(GEMM, 1035, 45, tid=2)
    w.launch("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNorm>", 1050, 4)
    w.span("Optimizer.step#AdamW.step", 1060, 1075).launch("void multi_tensor_apply_kernel<FusedAdam>", 1065, 9)
    w.span("Optimizer.zero_grad#AdamW.zero_grad", 1080, 1081)
    w.span("cudaDeviceSynchronize", 1090, 1300, "cuda_runtime")
    w.events[-1]["args"] = {"correlation": 99}
    return w


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_phases_of_a_trace_without_labels(tmp_path, name):
    table = anybodys_step().read(tmp_path, name)
    device = table[table["lane"] == "device"]
    assert list(device["phase"]) == ["batch", "forward", "backward", "backward", "clip", "optimizer"]
    assert list(device["kind"]) == ["copy", *["matrix product"] * 3, "multi-tensor", "multi-tensor"]
    assert list(device["operator"])[:4] == ["", "aten.addmm", "aten.mm", ""]
    assert list(device["duration_ns"]) == [3000, 40_000, 45_000, 45_000, 4000, 9000]
    assert list(table.loc[table["kind"] == "wait", "duration_ns"]) == [210_000]
    assert list(table.columns) == timeline.COLUMNS and table["start_ns"].min() == 0
    assert (table.loc[device.index, "launch_ns"] <= device["start_ns"]).all()


def test_our_labels_go_before_guesses(tmp_path):
    w = Writer().span("step:3", 0, 100)
    w.span("phase:forward", 1, 20).launch(GEMM, 10, 5)
    w.span("phase:backward", 30, 60).launch(GEMM, 40, 5).launch(GEMM, 25, 5)
    table = w.read(tmp_path)
    device = table[table["lane"] == "device"].sort_values("launch_ns")
    assert list(device["phase"]) == ["forward", "between", "backward"] and set(device["step"]) == {3}
    assert list(table.loc[table["lane"] == "python", "name"]) == ["forward", "backward"]


def test_steps_of_the_profilers_own_schedule(tmp_path):
    w = Writer().span("ProfilerStep#7", 0, 50).span("ProfilerStep#8", 50, 100).launch(GEMM, 10, 1).launch(GEMM, 60, 1)
    assert list(w.read(tmp_path).query("lane == 'device'")["step"]) == [7, 8]


def test_gaps_and_busy_share(tmp_path):
    w = Writer().launch(GEMM, 0, 10, late=0).launch(GEMM, 1, 10, late=0).launch(GEMM, 60, 20, late=0)
    table = w.read(tmp_path)
    assert timeline.gaps(table).to_dict("records") == [{"start_ns": 20_000, "duration_ns": 40_000, "before": "forward"}]
    assert timeline.gaps(table, least_ns=40_001).empty
    assert timeline.busy_ratio(table) == pytest.approx(0.5)


def test_kernels_close_to_each_other_are_one_stretch(tmp_path):
    w = Writer().launch(GEMM, 0, 10, late=0).launch(ADD, 1, 10, late=0).launch(GEMM, 60, 20, late=0)
    joined = timeline.stretches(w.read(tmp_path), gap_ns=1000)
    assert joined[["kind", "start_ns", "duration_ns"]].values.tolist() == [
        ["several", 0, 20_000], ["matrix product", 60_000, 20_000]]
    assert len(timeline.stretches(w.read(tmp_path), gap_ns=50_000)) == 1


def test_kernels_are_counted_by_kind(tmp_path):
    counted = timeline.by_kind(anybodys_step().read(tmp_path))
    backward = counted[counted["phase"] == "backward"].iloc[0]
    assert (backward["kind"], backward["kernel_count"], backward["busy_ns"]) == ("matrix product", 2, 90_000)


@pytest.mark.parametrize("kernel, kind", [
    (GEMM, "matrix product"), (ADD, "element-wise"), ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix product"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)", "attention"),
    ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*)", "softmax"),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(float*)", "softmax"),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)", "layer norm"),
    ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>(long)", "layer norm"),
    ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float>>(float)", "reduction"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>",
     "multi-tensor"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)", "fill"),
    ("Memset (Device)", "fill"), ("Memcpy DtoH (Device -> Pinned)", "copy"), ("my_kernel", "other")])
def test_a_kernels_name_says_what_it_is(kernel, kind):
    assert timeline.kind_of(kernel) == kind and kind in timeline.KINDS


def test_short_names():
    assert timeline.short(ADD) == "vectorized_elementwise_kernel: CUDAFunctor_add"
    assert timeline.short(GEMM) == GEMM and timeline.short("Memset (Device)") == "Memset"


@pytest.mark.parametrize("content", [
    b"", b"no json", b"[1, 2", b'{"events": []}', b"\x1f\x8bno gzip", b'{"traceEvents": 3}',
    b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k"}]}'])
def test_what_is_no_trace_is_said_in_a_line(tmp_path, content):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^bad\.json is not a Chrome trace") as error:
        timeline.read(tmp_path / "bad.json")
    assert "\n" not in str(error.value)


def test_a_trace_without_a_gpu_has_no_kernels():
    with timeline.profiler() as profile, record_function("step:1"), record_function("phase:forward"):
        torch.ones(3) + 1
    table = timeline.of(profile)
    assert list(table["lane"]) == ["python"] and list(table["phase"]) == ["forward"]
    assert timeline.by_kind(table).empty and timeline.gaps(table).empty


def test_the_step_of_the_study_is_labelled_for_the_profiler():
    from gpt2.step import Recipe, Training
    from gpt2.study.timing.stream import labelled

    training = Training(Recipe(model="tiny", batch=1, length=8, clip=1.0), device="cpu")
    training.watch = labelled
    with timeline.profiler() as profile:
        training.step(1)
    lines = timeline.of(profile).query("lane == 'python'")["name"]
    assert list(lines) == ["forward", "backward", "del logits", "clip", "optimizer", "zero_grad"]
