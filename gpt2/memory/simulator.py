"""A GPU that this machine does not have.

    with SimulatedGpu("A40", torch="2.5.1") as card:
        ...ordinary PyTorch with device="cuda"...
    trace = card.trace()

Inside, `cuda` tensors have shapes but no values, and every allocation goes through a replica of the caching allocator.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import torch as pytorch

from gpt2.memory import gpus, values  # noqa: F401  (rules register)
from gpt2.memory.allocator import CachingAllocator, OutOfMemory
from gpt2.memory.caching.driver import Driver
from gpt2.memory.caching.settings import Settings
from gpt2.memory.claims import Claims, settle
from gpt2.memory.faces.patches import Patches
from gpt2.memory.kernels import rules  # noqa: F401  (rules register)
from gpt2.memory.labels import Labels
from gpt2.memory.operators import attention, autocast  # noqa: F401  (rules register)
from gpt2.memory.operators.dispatch import Tracker
from gpt2.memory.software import CUBLASLT_WORKSPACE, software
from gpt2.memory.trace import Category, Event, Mark, Trace

_in_backward = pytorch._C._current_graph_task_id


class SimulatedGpu:
    """A card by name or profile, with the software of one PyTorch release, behind `torch.cuda` while it is entered.

    Args:
        gpu: a name of `gpus.names()` or a `Gpu`.
        torch: whose rules to follow; default the installed release.
        limit_bytes: what the process may reserve, as `set_per_process_memory_fraction` would limit it.
        allocator_conf: the text of PYTORCH_CUDA_ALLOC_CONF.
        stacks: record a Python stack with every event.

    Raises ValueError for an unknown card, release or allocator option. Exceeding the card raises
    `torch.OutOfMemoryError` with PyTorch's message. Everything is restored on exit, also after an exception.
    """

    def __init__(
        self,
        gpu: str | gpus.Gpu = "H200",
        *,
        torch: str | None = None,
        limit_bytes: int | None = None,
        allocator_conf: str = "",
        stacks: bool = False,
    ):
        self.gpu = gpus.find(gpu) if isinstance(gpu, str) else gpu
        self.torch = torch or pytorch.__version__.partition("+")[0]
        self.software = software(self.torch, self.gpu)
        self.software_lt_bytes = CUBLASLT_WORKSPACE
        self.allocator_conf = allocator_conf
        self.settings = Settings.parse(allocator_conf, self.torch)
        self.limit_bytes, self.fraction = limit_bytes, 1.0
        self.driver = Driver(self.gpu.memory_bytes, self.gpu.free_bytes_at_start)
        self.allocator = CachingAllocator(
            self.driver, settings=self.settings, limit_bytes=limit_bytes, torch=self.torch, record=self._record
        )
        self.tracker = Tracker(self)
        self.position = 0  # allocations and frees so far
        self.labels = Labels(
            Claims(self.tracker.block, lambda: self.position),
            stacks=stacks,
            forward_begins=self.driver.release_context_range,
        )
        self.events: list[Event] = []
        self.marks: list[Mark] = []
        self.stream, self.streams, self._stream_stack = 0, 0, []
        self.history = False
        self._workspaces: dict[tuple, int] = {}
        self.operator, self.shape, self.dtype, self._library = "", (), None, ""
        self.out_of_memory: dict | None = None
        self._open = False

    # --- a context ------------------------------------------------------------------------------------------------

    def __enter__(self) -> SimulatedGpu:
        if self._open:
            raise RuntimeError("this SimulatedGpu is already entered")
        with ExitStack() as stack:
            patches = Patches(self)
            stack.callback(patches.remove)
            patches.install()
            stack.callback(self.labels.remove)
            self.labels.install()
            stack.enter_context(attention.kernels(self))
            stack.enter_context(autocast.kernels(self))
            stack.enter_context(self.tracker)
            self._exit = stack.pop_all()
        self._open = True
        return self

    def __exit__(self, *error) -> None:
        self._open = False
        self._exit.__exit__(*error)
        self.tracker.live.clear()

    # --- memory ---------------------------------------------------------------------------------------------------

    def malloc(self, size: int) -> int:
        """Allocate on the current stream; raises torch.OutOfMemoryError as the card would."""
        try:
            return self.allocator.malloc(size, self.stream)
        except OutOfMemory as error:
            labels = self.labels
            self.out_of_memory = {
                "step": labels.current_step(),
                "phase": labels.phase(),
                "module": labels.module(),
                "operator": self._operator_name(),
                "requested_bytes": size,
                "rounded_bytes": error.rounded_bytes,
                "segment_bytes": error.segment_bytes,
                "allocated_bytes": error.allocated_bytes,
                "reserved_bytes": error.reserved_bytes,
                "shape": list(self.shape),
                "line": values.user_line(),
            }
            raise pytorch.OutOfMemoryError(error.message()) from None

    def take(self, size: int, what: str) -> int:
        """Allocate for a library or kernel: `what` says for whom."""
        self._library, self.shape, self.dtype = what, (size,), pytorch.uint8
        try:
            return self.malloc(size) if size else 0
        finally:
            self._library = ""

    def free(self, address: int) -> None:
        """Free a block; nothing happens once the card is closed."""
        if self._open:
            self.allocator.free(address)

    def workspace(self, what: str, size: int) -> None:
        """A library's buffer, one per thread and stream, made at first use and kept."""
        thread = "engine" if _in_backward() != -1 else "program"
        key = (what, thread, self.stream)
        if key not in self._workspaces:
            if self.gpu.capability[0] == 9:  # where it was seen
                self.driver.open_cublas(thread)
            self._workspaces[key] = self.take(size, what)

    def clear_workspaces(self) -> None:
        """torch._C._cuda_clearCublasWorkspaces."""
        for address in self._workspaces.values():
            self.free(address)
        self._workspaces.clear()

    def _operator_name(self) -> str:
        if self._library:
            return self._library
        name = str(self.operator)
        return name.rpartition(".")[0] or name

    def _record(self, action: str, address: int, requested: int, block: int, stream: int) -> None:
        labels = self.labels
        self.position += action in ("alloc", "free", "free_requested")
        if action == "alloc" or action == "oom":
            category = Category.WORKSPACE.value if self._library else ""
            self.events.append(
                Event(
                    action,
                    address,
                    requested,
                    block,
                    stream,
                    labels.current_step(),
                    labels.phase(),
                    labels.module(),
                    self._operator_name(),
                    tuple(self.shape),
                    str(self.dtype).removeprefix("torch."),
                    category,
                    labels.stack(),
                )
            )
        else:
            self.events.append(Event(action, address, requested, block, stream, labels.current_step(), labels.phase()))

    # --- what torch.cuda asks -------------------------------------------------------------------------------------

    def mem_get_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        return self.driver.free_bytes, self.gpu.memory_bytes

    def set_fraction(self, fraction: float) -> None:
        """torch.cuda.set_per_process_memory_fraction."""
        self.fraction = fraction
        self.allocator.set_fraction(fraction)

    def properties(self) -> SimpleNamespace:
        """torch.cuda.get_device_properties."""
        gpu = self.gpu
        return SimpleNamespace(
            name=gpu.device_name,
            major=gpu.capability[0],
            minor=gpu.capability[1],
            total_memory=gpu.memory_bytes,
            multi_processor_count=gpu.sms,
            max_threads_per_multi_processor=gpu.threads_per_sm,
            warp_size=32,
            is_integrated=False,
            is_multi_gpu_board=False,
            regs_per_multiprocessor=65536,
            gcnArchName="",
            uuid="",
            shared_memory_per_block=49152,
            L2_cache_size=0,
        )

    def record_history(self, enabled="all", *args, **kwargs) -> None:
        """torch.cuda.memory._record_memory_history: the trace is always kept; stacks from here on."""
        self.history = bool(enabled)
        self.labels.with_stacks = self.history

    def snapshot(self) -> dict:
        """torch.cuda.memory._snapshot, in PyTorch's own form."""
        from gpt2.memory import snapshot

        return snapshot.from_simulation(self)

    def record_stream(self, tensor, stream) -> None:
        """Tensor.record_stream: the block may not be reused before `stream` is done with it."""
        self.allocator.record_stream(self.tracker.block(tensor), stream.cuda_stream)

    def wait_for_stream(self) -> None:
        """A copy between host and card that blocks waits for the current stream. CUDAFunctions.h, memcpy_and_sync."""
        self.allocator.synchronize(self.stream)

    def set_stream(self, number: int) -> None:
        """torch.cuda.set_stream."""
        self.stream = number

    def enter_stream(self, number: int) -> None:
        """Make a stream current, remembering the one before."""
        self._stream_stack.append(self.stream)
        self.stream = number

    def leave_stream(self) -> None:
        """Back to the stream before."""
        self.stream = self._stream_stack.pop()

    # --- the instrument ---------------------------------------------------------------------------------------------

    @contextmanager
    def watch(self, phase: str, step: int):
        """Announce a phase of a step: its events carry the names, and its end is a mark of the trace."""
        labels = self.labels
        labels.announced, labels.step, labels.watched = phase, step, True
        try:
            yield
        finally:
            labels.announced = ""
        self.mark(phase, step)

    def mark(self, name: str, step: int | None = None) -> None:
        """Note the counters now, under a name."""
        allocator = self.allocator
        self.marks.append(
            Mark(
                name,
                len(self.events),
                self.labels.current_step() if step is None else step,
                allocator.allocated_bytes,
                allocator.reserved_bytes,
                allocator.max_allocated_bytes,
                allocator.max_reserved_bytes,
            )
        )

    def trace(self, **meta) -> Trace:
        """What happened so far. `meta` is added to what the card says of itself."""
        about = {
            "kind": "predicted",
            "gpu": self.gpu.name,
            "torch": self.torch,
            "limit_bytes": self.limit_bytes,
            "allocator_conf": self.allocator_conf,
            "capacity_bytes": self.gpu.free_bytes_at_start,
            "out_of_memory": self.out_of_memory,
        }
        return Trace(
            settle(self.events, self.labels.claims.made), list(self.marks), list(self.labels.stacks), {**about, **meta}
        )


def collect_garbage() -> None:
    """Cycles keep storages alive; a run that must be repeatable starts without old ones."""
    gc.collect()


warnings.filterwarnings("ignore", message="Overriding a previously registered kernel")
