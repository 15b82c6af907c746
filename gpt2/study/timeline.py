"""The stream of kernels of a step, read from a Chrome trace that torch.profiler exported: ours, or anybody's.

    with torch.profiler.profile() as profile:
        step()
    profile.export_chrome_trace("step.json.gz")      # anywhere, by anyone
    table = timeline.read("step.json.gz")

A trace without our labels is read as well: backward is what the autograd engine launches, the optimizer announces
itself, and what lies between the two is clipping.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
import tempfile
from pathlib import Path

import pandas as pd

COLUMNS = ["step", "lane", "phase", "kind", "name", "operator", "stream", "start_ns", "duration_ns", "launch_ns"]
LANES = ("python", "host", "device")  # lines of Python, calls to the CUDA runtime, kernels
PHASE, STEP = "phase:", "step:"  # how our own annotations begin
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_RUNTIME = {"cuda_runtime", "cuda_driver"}
_ANNOTATIONS = {"user_annotation", "cpu_op"}
_ENGINE = "autograd::engine::evaluate_function"
_STEP = re.compile(r"(?:step:|ProfilerStep#)(\d+)")
_WAITS = re.compile(r"Synchronize|EventQuery")

# In order: the first that is found in a kernel's name says what the kernel is.
_KINDS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in (
    ("copy", r"^memcpy"),
    ("fill", r"^memset|FillFunctor"),
    ("attention", r"flash|fmha|sdpa|attention|compute_dot_do_o|convert_dq"),
    ("matrix product", r"gemm|gemv|cutlass|xmma|nvjet|cublas|splitK|dot_kernel"),
    ("multi-tensor", r"multi_tensor_apply|fused_?adam|lpnorm_cleanup"),
    ("softmax", r"softmax|masked_scale"),
    ("loss", r"nll_loss|cross_entropy"),
    ("layer norm", r"layer_?norm|GammaBeta|cuComputeGradInput|RowwiseMoments"),
    ("embedding", r"embedding|indexSelect|gather|scatter|index_(put|elementwise|kernel|func)|sort|radix"
                  r"|Device(Scan|Compact)|unique|krn_partial|sum_and_scatter|compute_(grad|num)|write_num"),
    ("reduction", r"reduce"),
    ("element-wise", r"elementwise|CatArray|triu_tril|copy_|distribution|arange"),
)]
KINDS = tuple(dict.fromkeys([*(kind for kind, _ in _KINDS), "other"]))


def read(path: str | Path) -> pd.DataFrame:
    """The timeline in a Chrome trace (.json or .json.gz): one row per kernel, runtime call or labelled line of Python.

    Columns: step (0 if the trace does not say), lane, phase, kind, name, operator (the innermost ATen operator that
    launched it), stream, start_ns since the first row, duration_ns, launch_ns (when the host launched it).
    Raises ValueError, naming the file, if it is not such a trace.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        events = document["traceEvents"] if isinstance(document, dict) else document
        return from_events([e for e in events if isinstance(e, dict) and e.get("ph") == "X"])
    except (OSError, EOFError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path.name} is not a Chrome trace of torch.profiler: {error}") from error


def profiler():
    """A `torch.profiler.profile` of host and device, wherever there is one."""
    import torch

    wanted = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=[a for a in wanted if a in torch.profiler.supported_activities()])


def of(profile) -> pd.DataFrame:
    """The timeline of a `torch.profiler.profile` that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return read(path)


def from_events(events: list[dict]) -> pd.DataFrame:
    """The timeline of the complete events ("ph": "X") of a Chrome trace."""
    runtime = {_correlation(e): e for e in events if e.get("cat") in _RUNTIME}
    device = sorted((e for e in events if e.get("cat") in _DEVICE), key=_start)
    spans = [e for e in events if e.get("cat") in _ANNOTATIONS]
    phases, operators = _Phases(spans), _Operators(spans)
    rows = []
    for event in device:
        call = runtime.get(_correlation(event))
        launch, thread = (_start(call), call.get("tid")) if call else (_start(event), None)
        name, stream = event["name"], int(event.get("args", {}).get("stream", 0))
        rows.append((phases.step(launch), "device", phases.at(launch, name), kind_of(name), name,
                     operators.at(launch, thread), stream, _start(event), _duration(event), launch))
    launched = {_correlation(e) for e in device}
    for event in sorted(runtime.values(), key=_start):
        kind = _host_kind(event["name"], _correlation(event) in launched)
        if kind:
            start = _start(event)
            rows.append((phases.step(start), "host", phases.at(start, ""), kind, event["name"],
                         operators.at(start, event.get("tid")), 0, start, _duration(event), start))
    for name, start, end in phases.lines:
        rows.append((phases.step(start), "python", name, "line", name, "", 0, start, end - start, start))
    table = _clipped(pd.DataFrame(rows, columns=COLUMNS))
    if len(table):
        first = table["start_ns"].min()
        table[["start_ns", "launch_ns"]] -= first
    return table


def kind_of(kernel: str) -> str:
    """What sort of work a kernel does, by its name: one of KINDS."""
    return next((kind for kind, pattern in _KINDS if pattern.search(kernel)), "other")


def short(kernel: str) -> str:
    """A kernel's name without its template: the function, and the functor that an element-wise kernel applies."""
    plain = re.sub(r"^void ", "", kernel).replace("(anonymous namespace)::", "")
    head = re.split(r"[<(]", plain)[0].split("::")[-1].strip()
    functors = re.findall(r"\b(\w*(?:Functor|Op|Ops|kernel_cuda|_kernel_impl)\w*)\b", kernel.partition("<")[2])
    functor = next((f for f in functors if f not in head), "")
    return f"{head}: {functor}" if functor else head


def by_kind(table: pd.DataFrame) -> pd.DataFrame:
    """Kernels of a timeline, counted and added up: phase, kind, kernel_count, busy_ns; phases in order of time."""
    device = table[table["lane"] == "device"]
    groups = device.groupby(["phase", "kind"], sort=False)["duration_ns"].agg(["size", "sum"]).reset_index()
    groups.columns = ["phase", "kind", "kernel_count", "busy_ns"]
    return groups


def gaps(table: pd.DataFrame, least_ns: int = 0) -> pd.DataFrame:
    """When the device had nothing to do between its first and last kernel: start_ns, duration_ns, before (the phase of
    the kernel that ended the gap); gaps of `least_ns` and more."""
    device = table[table["lane"] == "device"].sort_values("start_ns")
    rows, end = [], None
    for start, duration, phase in zip(device["start_ns"], device["duration_ns"], device["phase"], strict=True):
        if end is not None and start - end > max(0, least_ns - 1):
            rows.append((end, start - end, phase))
        end = max(end or 0, start + duration)
    return pd.DataFrame(rows, columns=["start_ns", "duration_ns", "before"])


def stretches(table: pd.DataFrame, gap_ns: int) -> pd.DataFrame:
    """The device's kernels with neighbours of one step and phase joined where less than `gap_ns` lies between them."""
    rows: list[dict] = []
    for row in table[table["lane"] == "device"].sort_values("start_ns").to_dict("records"):
        last = rows[-1] if rows else None
        if last and (last["step"], last["phase"]) == (row["step"], row["phase"]) \
                and row["start_ns"] - last["start_ns"] - last["duration_ns"] < gap_ns:
            last["duration_ns"] = row["start_ns"] + row["duration_ns"] - last["start_ns"]
            last["kind"] = last["kind"] if last["kind"] == row["kind"] else "several"
        else:
            rows.append(row)
    return pd.DataFrame(rows, columns=table.columns)


def busy_ratio(table: pd.DataFrame) -> float:
    """Share of the time between its first and last kernel in which the device worked."""
    device = table[table["lane"] == "device"]
    whole = (device["start_ns"] + device["duration_ns"]).max() - device["start_ns"].min()
    return 1 - gaps(table)["duration_ns"].sum() / whole


class _Phases:
    """Which phase and step a moment of the host belongs to."""

    def __init__(self, spans: list[dict]):
        named = [(e["name"], _start(e), _start(e) + _duration(e)) for e in spans]
        lines = [(name.removeprefix(PHASE), a, b) for name, a, b in named if name.startswith(PHASE)]
        announced = [("optimizer", a, b) for name, a, b in named if name.startswith("Optimizer.step#")]
        announced += [("zero_grad", a, b) for name, a, b in named if name.startswith("Optimizer.zero_grad#")]
        engine = [("backward", a, b) for name, a, b in named if name.startswith(_ENGINE)]
        self.lines = sorted(lines or announced, key=lambda line: line[1])
        self._ours, self._found = _Intervals(lines), [_Intervals(announced), _Intervals(engine)]
        steps = [(int(m[1]), a, b) for name, a, b in named if (m := _STEP.fullmatch(name))]
        self._steps, self._labelled = _Intervals(steps), bool(lines)

    def step(self, moment: int) -> int:
        return self._steps.at(moment) or 0

    def at(self, moment: int, name: str) -> str:
        phase = self._ours.at(moment)
        if phase or self._labelled:
            return phase or "between"
        phase = next((p for found in self._found if (p := found.at(moment))), "")
        return phase or ("batch" if "HtoD" in name else "forward")


class _Intervals:
    """Labelled stretches of time; those of one label that overlap are one."""

    def __init__(self, intervals):
        self._joined: list[list] = []
        for label, start, end in sorted(intervals, key=lambda interval: interval[1]):
            if self._joined and self._joined[-1][0] == label and start <= self._joined[-1][2]:
                self._joined[-1][2] = max(end, self._joined[-1][2])
            else:
                self._joined.append([label, start, end])
        self._starts = [start for _, start, _ in self._joined]

    def at(self, moment: int):
        """The label of the stretch that holds the moment, or None."""
        i = bisect.bisect_right(self._starts, moment) - 1
        return self._joined[i][0] if i >= 0 and moment <= self._joined[i][2] else None


class _Operators:
    """The innermost ATen operator that was running on a thread at a moment."""

    def __init__(self, spans: list[dict]):
        self._of: dict = {}
        for e in spans:
            if e["name"].startswith("aten::"):
                self._of.setdefault(e.get("tid"), []).append((_start(e), _start(e) + _duration(e), e["name"]))
        for spans_of_thread in self._of.values():
            spans_of_thread.sort()
        self._starts = {tid: [s[0] for s in spans_of_thread] for tid, spans_of_thread in self._of.items()}

    def at(self, moment: int, thread) -> str:
        spans = self._of.get(thread, [])
        i = bisect.bisect_right(self._starts.get(thread, []), moment) - 1
        for start, end, name in reversed(spans[max(0, i - 12):i + 1]):
            if start <= moment <= end:
                return name.replace("::", ".", 1)
        return ""


def _clipped(table: pd.DataFrame) -> pd.DataFrame:
    """Without labels, what is launched after backward and before the optimizer is clipping."""
    device = table[table["lane"] == "device"].sort_values("launch_ns")
    phases = list(device["phase"])
    for i, phase in enumerate(phases):
        if phase == "forward" and i and phases[i - 1] in ("backward", "clip"):
            following = next((p for p in phases[i:] if p != "forward"), "")
            if following == "optimizer":
                phases[i] = "clip"
    table.loc[device.index, "phase"] = phases
    return table


def _host_kind(name: str, launches: bool) -> str:
    """What a call to the CUDA runtime is for; "" for questions that cost nothing."""
    if _WAITS.search(name):
        return "wait"
    if "Malloc" in name or "Free" in name:
        return "memory"
    return "launch" if launches else ""


def _correlation(event: dict) -> int:
    return event.get("args", {}).get("correlation", -1)


def _start(event: dict) -> int:
    return round(float(event["ts"]) * 1000)


def _duration(event: dict) -> int:
    return round(float(event.get("dur", 0)) * 1000)
