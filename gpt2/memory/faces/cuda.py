"""The faces of torch.cuda: the driver under it, its streams and events, and torch.accelerator beside it."""

from __future__ import annotations

import types
from contextlib import contextmanager

import torch

from gpt2.memory import values
from gpt2.memory.faces.face import CUDA, Faces, checked


class CudaFaces(Faces):
    """`torch._C._cuda_*` and what of `torch.cuda` does not go through it."""

    def _driver(self) -> None:
        card, c = self.card, torch._C
        allocator = card.allocator
        gpu = card.gpu
        answers = {
            "_cuda_getDeviceCount": lambda *a: 1,
            "_cuda_getDevice": lambda: 0,
            "_cuda_setDevice": lambda d: checked(d) and None,
            "_cuda_exchangeDevice": lambda d: 0,
            "_cuda_maybeExchangeDevice": lambda d: 0,
            "_cuda_init": lambda: None,
            "_cuda_synchronize": lambda: allocator.synchronize(),
            "_cuda_emptyCache": lambda: allocator.empty_cache(),
            "_cuda_memoryStats": lambda d: nested(allocator.stats()),
            "_cuda_ipc_collect": lambda: None,
            "_cuda_resetPeakMemoryStats": lambda d: allocator.reset_peak_stats(),
            "_cuda_resetAccumulatedMemoryStats": lambda d: allocator.reset_accumulated_stats(),
            "_cuda_setMemoryFraction": lambda f, d: card.set_fraction(f),
            "_cuda_getMemoryFraction": lambda d: card.fraction,
            "_cuda_memorySnapshot": lambda *a: card.snapshot(),
            "_cuda_getAllocatorBackend": lambda: "native",
            "_cuda_record_memory_history": lambda *a, **k: card.record_history(*a, **k),
            "_cuda_getCompiledVersion": lambda: 13000,
            "_cuda_getArchFlags": lambda: "sm_{}{}".format(*gpu.capability),
            "_cuda_canDeviceAccessPeer": lambda a, b: False,
            "_cuda_isCurrentStreamCapturing": lambda: False,
            "_cuda_clearCublasWorkspaces": lambda: card.clear_workspaces(),
            "_cuda_hostMemoryStats": lambda: {},
            "_cuda_attach_out_of_memory_observer": lambda f: None,
            "_cuda_cudaCachingAllocator_raw_alloc": lambda n, s: card.malloc(n),
            "_cuda_cudaCachingAllocator_raw_delete": lambda p: card.free(p),
            "_cuda_get_sync_debug_mode": lambda: 0,
            "_cuda_set_sync_debug_mode": lambda m: None,
            "_cuda_isHistoryEnabled": lambda: card.history,
            "_cuda_lock_mutex": lambda: None,
            "_cuda_unlock_mutex": lambda: None,
        }
        for name, answer in answers.items():
            self.set(c, name, answer)
        cuda = torch.cuda
        self.set(cuda, "_exchange_device", lambda device: 0)
        self.set(cuda, "_maybe_exchange_device", lambda device: 0)
        self.set(cuda, "_lazy_init", lambda: None)
        self.set(cuda, "_initialized", True)
        self.set(cuda, "is_available", lambda: True)
        self.set(cuda, "is_initialized", lambda: True)
        self.set(cuda, "device_count", lambda: 1)
        self.set(
            cuda, "is_bf16_supported", lambda including_emulation=True: gpu.capability >= (8, 0) or including_emulation
        )
        self.set(cuda, "get_device_properties", lambda device=None: checked(device or 0) and card.properties())
        self.set(cuda, "get_device_name", lambda device=None: gpu.device_name)
        self.set(cuda, "get_device_capability", lambda device=None: gpu.capability)
        self.set(cuda, "mem_get_info", lambda device=None: card.mem_get_info())
        self.set(cuda.memory, "mem_get_info", lambda device=None: card.mem_get_info())
        self.set(cuda, "default_generators", (torch.Generator(),))
        self.set(torch.version, "cuda", torch.version.cuda or "13.0")

    def _accelerator(self) -> None:
        """torch.accelerator, PyTorch's newer name for the same card, and NVTX, which nobody listens to."""
        accelerator, cuda = torch.accelerator, torch.cuda
        answers = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "current_device_index": lambda: 0,
            "current_device_idx": lambda: 0,
            "synchronize": lambda device=None: cuda.synchronize(),
            "current_stream": lambda device=None: cuda.current_stream(),
        }
        same = ("empty_cache", "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved")
        same += ("max_memory_reserved", "reset_accumulated_memory_stats", "reset_peak_memory_stats")
        for name in same:
            answers[name] = lambda *args, _name=name: getattr(cuda, _name)()
        for name, answer in answers.items():
            if hasattr(accelerator, name):
                self.set(accelerator, name, answer)
        silent = types.SimpleNamespace(
            rangePushA=lambda text: 0,
            rangePop=lambda: 0,
            markA=lambda text: None,
            rangeStartA=lambda text: 0,
            rangeEnd=lambda which: None,
        )
        self.set(torch.cuda.nvtx, "_nvtx", silent)

    def _streams(self) -> None:
        card, cuda = self.card, torch.cuda

        class Stream:
            """A stream of the simulated card: a number."""

            def __init__(self, device=None, priority=0, *, number=None, **_):
                card.streams += number is None
                self.cuda_stream = self.stream_id = card.streams if number is None else number
                self.device, self.device_index, self.priority = CUDA, 0, priority

            def wait_stream(self, other):
                pass

            def wait_event(self, event):
                pass

            def is_capturing(self):
                return False

            def query(self):
                return True

            def synchronize(self):
                card.allocator.synchronize()

            def record_event(self, event=None):
                return event or Event()

            def __eq__(self, other):
                return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

            def __hash__(self):
                return hash(self.cuda_stream)

            def __enter__(self):
                card.enter_stream(self.cuda_stream)

            def __exit__(self, *_):
                card.leave_stream()

        class Event:
            """An event that has always happened."""

            def __init__(self, *args, **kwargs):
                pass

            def record(self, stream=None):
                pass

            def wait(self, stream=None):
                pass

            def query(self):
                return True

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return values.Unknown()

        @contextmanager
        def stream(which):
            if which is None:
                yield
                return
            with which:
                yield

        self.set(cuda, "Stream", Stream)
        self.set(cuda, "Event", Event)
        self.set(cuda, "stream", stream)
        self.set(cuda, "current_stream", lambda device=None: Stream(number=card.stream))
        self.set(cuda, "default_stream", lambda device=None: Stream(number=0))
        self.set(cuda, "set_stream", lambda which: card.set_stream(which.cuda_stream))


def nested(flat: dict) -> dict:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`: the form in which the driver hands out statistics."""
    tree: dict = {}
    for key, value in flat.items():
        *path, leaf = key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree
