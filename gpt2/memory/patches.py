"""The faces a program sees while a GPU is simulated.

`torch._C._cuda_*` is where `torch.cuda` meets the driver: those functions are replaced, so that everything above them
(memory_summary, mem_get_info, autocast, GradScaler, ...) is PyTorch's own code. Tensor attributes that name the device
are replaced on `torch.Tensor`. `Patches` undoes it all.
"""

from __future__ import annotations

import inspect
import math
import types
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from gpt2.memory import values

if TYPE_CHECKING:
    from gpt2.memory.simulator import SimulatedGpu

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
META = torch.device("meta")
_missing = object()
_device_getter = torch._C.TensorBase.device.__get__


def _real_device(tensor: torch.Tensor) -> torch.device:
    """The device C++ sees; a function mode (a default device, say) would lead the getter back to our own face."""
    if torch._C._len_torch_function_stack():
        with torch._C.DisableTorchFunction():
            return _device_getter(tensor)
    return _device_getter(tensor)


def is_cuda(device) -> bool:
    """Whether `device`, in any of the forms PyTorch takes, means the card."""
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def checked(device):
    """`device` with its index; the simulated machine has one card."""
    if not is_cuda(device):
        return device
    index = device if isinstance(device, int) else torch.device(device).index or 0
    if index:
        raise RuntimeError("CUDA error: invalid device ordinal (the simulated machine has one GPU, cuda:0)")
    return CUDA


class Patches:
    """Everything that is replaced, and how it is put back."""

    def __init__(self, card: SimulatedGpu):
        self.card = card
        self.undo = ExitStack()

    def set(self, owner, name: str, value) -> None:
        """Replace `owner.name` until `remove`."""
        old = owner.__dict__.get(name, _missing) if isinstance(owner, type | types.ModuleType) else getattr(owner, name)
        setattr(owner, name, value)
        self.undo.callback(delattr, owner, name) if old is _missing else self.undo.callback(setattr, owner, name, old)

    def install(self) -> None:
        """Put on every face."""
        self._driver()
        self._tensors()
        self._streams()

    def remove(self) -> None:
        """Take them all off, in reverse."""
        self.undo.close()

    # --- torch.cuda's driver -------------------------------------------------------------------------------------

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
            "_cuda_getArchFlags": lambda: "sm_%d%d" % gpu.capability,
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

    # --- tensors -------------------------------------------------------------------------------------------------

    def _tensors(self) -> None:
        tracker, tensor = self.card.tracker, torch.Tensor
        knows = tracker.knows

        def device(t):
            real = _real_device(t)
            return real if tracker.inside or real.type != "meta" else CUDA if knows(t) else CPU

        def is_on_cuda(t):
            return not tracker.inside and _real_device(t).type == "meta" and knows(t)

        real_to, real_item, real_repr, real_bool = tensor.to, tensor.item, tensor.__repr__, tensor.__bool__
        real_data_ptr, real_numpy, real_tolist = tensor.data_ptr, tensor.numpy, tensor.tolist

        def place(t, target):
            """The device to give to C++, which knows the card's and valueless host tensors as meta."""
            on_card = is_on_cuda(t)
            if is_cuda(target):
                return META if on_card else checked(target)
            return META if not on_card and _real_device(t).type == "meta" else target

        def to(t, *args, **kwargs):
            if args and isinstance(args[0], torch.Tensor):
                args = (device(args[0]), args[0].dtype, *args[1:])
            if args and not isinstance(args[0], torch.dtype):
                args = (place(t, args[0]), *args[1:])
            if kwargs.get("device") is not None:
                kwargs["device"] = place(t, kwargs["device"])
            return real_to(t, *args, **kwargs)

        def valueless(t):
            return _real_device(t).type == "meta"

        def known(t):
            """The tensor itself if it has values, what is known of it if it has not, None if nothing is."""
            return tracker.known.value(t) if valueless(t) else t

        def boolean(t):
            if (value := known(t)) is not None:
                return real_bool(value)
            if values.initialising():
                return False  # trunc_normal_ draws until no value is out of range
            raise values.branch("the truth of a tensor")

        def number(name):
            real = getattr(tensor, name)
            return lambda t: _refuse() if (value := known(t)) is None else real(value)

        def _refuse():
            raise values.branch("a number made of a tensor")

        def on_host(t):
            value = known(t)
            return values.to_host(t, {}) if value is None else value

        self.set(tensor, "device", property(device))
        self.set(tensor, "is_cuda", property(is_on_cuda))
        self.set(tensor, "is_meta", property(lambda t: tracker.inside and _real_device(t).type == "meta"))
        self.set(tensor, "is_cpu", property(lambda t: not is_on_cuda(t)))
        self.set(tensor, "to", to)
        self.set(
            tensor,
            "cuda",
            lambda t, device=None, non_blocking=False, memory_format=torch.preserve_format: to(
                t, CUDA if device is None else device, non_blocking=non_blocking, memory_format=memory_format
            ),
        )
        self.set(tensor, "cpu", lambda t, memory_format=torch.preserve_format: to(t, CPU, memory_format=memory_format))
        self.set(tensor, "item", lambda t: values.read(t) if (value := known(t)) is None else real_item(value))
        self.set(tensor, "tolist", lambda t: real_tolist(on_host(t)))
        self.set(tensor, "numpy", lambda t, *a, **k: real_numpy(on_host(t), *a, **k))
        self.set(tensor, "__bool__", boolean)
        for name in ("__int__", "__index__"):
            self.set(tensor, name, number(name))
        real_float = tensor.__float__
        self.set(
            tensor, "__float__", lambda t: float(values.read(t)) if (value := known(t)) is None else real_float(value)
        )
        for name, answer in (("isnan", False), ("isinf", False), ("isfinite", True)):
            self.set(math, name, _finite(getattr(math, name), answer))
        real_type = tensor.type
        self.set(
            tensor,
            "type",
            lambda t, dtype=None, **k: (
                real_type(t, dtype, **k)
                if dtype is not None
                else (real_type(t).replace("torch.meta", "torch.cuda" if is_on_cuda(t) else "torch"))
            ),
        )
        self.set(
            tensor,
            "__repr__",
            lambda t, *, tensor_contents=None: (
                f"tensor(..., device='{t.device}', size={tuple(t.shape)}, dtype={t.dtype})"
                if valueless(t)
                else real_repr(t)
            ),
        )
        self.set(tensor, "__format__", lambda t, spec: format(t.item(), spec) if t.dim() == 0 else repr(t))
        self.set(tensor, "data_ptr", lambda t: tracker.address(t) if valueless(t) else real_data_ptr(t))
        self.set(tensor, "get_device", lambda t: 0 if is_on_cuda(t) else -1)
        self.set(tensor, "pin_memory", lambda t, device=None: t)
        self.set(tensor, "is_pinned", lambda t, device=None: not is_on_cuda(t))
        self.set(tensor, "record_stream", lambda t, stream: self.card.record_stream(t, stream))
        self._constructors()
        self._parameters()
        self._grouping()
        self._files()
        self._loaders()
        self._accelerator()

    def _constructors(self) -> None:
        """`torch.tensor(..., device="cuda")` makes a host tensor first and moves it; a device without index fails there."""
        torch.utils._device._device_constructors()  # remembered now, with PyTorch's own functions
        for name in ("tensor", "as_tensor", "asarray", "scalar_tensor"):
            real = getattr(torch, name)

            def construct(*args, _real=real, **kwargs):
                if "device" in kwargs:
                    kwargs["device"] = checked(kwargs["device"])
                return _real(*args, **kwargs)

            self.set(torch, name, construct)
        from torch.utils._device import DeviceContext

        real_init, real_call, tracker = DeviceContext.__init__, DeviceContext.__torch_function__, self.card.tracker

        def call(context, func, types, args=(), kwargs=None):
            if context.device.type != "meta":
                return real_call(context, func, types, args, kwargs)
            with hosting(tracker):  # the program builds a model without memory
                return real_call(context, func, types, args, kwargs)

        self.set(DeviceContext, "__init__", lambda self, device: real_init(self, checked(torch.device(device))))
        self.set(DeviceContext, "__torch_function__", call)
        real_default = torch._C._set_only_lift_cpu_tensors
        real_default(True)
        self.undo.callback(real_default, False)

    def _parameters(self) -> None:
        """Parameters made while a GPU is simulated have no values, so that moving them keeps their identity."""
        real_new, tracker = torch.nn.Parameter.__new__, self.card.tracker

        def new(cls, data=None, requires_grad=True):
            if isinstance(data, torch.Tensor) and _real_device(data).type == "cpu" and data.dtype.is_floating_point:
                with hosting(tracker):
                    data = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device="meta")
            return real_new(cls, data, requires_grad)

        self.set(torch.nn.Parameter, "__new__", staticmethod(new))

    def _files(self) -> None:
        """torch.save notes that a tensor was on the card; torch.load puts it there. Contents do not exist."""
        tracker, serialization = self.card.tracker, torch.serialization
        real_tag, real_restore = serialization.location_tag, serialization.default_restore_location

        def tag(storage):
            untyped = getattr(storage, "_untyped_storage", storage)
            return "cuda:0" if untyped._cdata in tracker.live else real_tag(storage)

        def restore(storage, location):
            if not str(location).startswith("cuda"):
                return real_restore(storage, location)
            checked(torch.device(location))
            return torch.empty(storage.nbytes(), dtype=torch.uint8, device=CUDA).untyped_storage()

        class Generator(torch._C.Generator):
            """A generator of the card draws nothing; the host's stands in."""

            def __new__(cls, device="cpu"):
                return super().__new__(cls, CPU if is_cuda(device) else device)

        self.set(serialization, "location_tag", tag)
        self.set(serialization, "default_restore_location", restore)
        self.set(torch, "Generator", Generator)

    def _loaders(self) -> None:
        """Data is loaded in this process: host tensors without values cannot travel between processes, and workers and
        pinned memory take nothing of the card."""
        loader = torch.utils.data.DataLoader
        real_init = loader.__init__
        signature = inspect.signature(real_init)

        def init(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            extra = given.pop("kwargs", {})
            dropped = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
            given = {name: value for name, value in given.items() if name not in dropped}
            real_init(given.pop("self"), **{**given, **extra, "pin_memory": False})

        self.set(loader, "__init__", init)

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

    def _grouping(self) -> None:
        """Foreach code groups tensors by device in C++, which sees meta."""
        real = torch._C._group_tensors_by_device_and_dtype

        def group(lists, with_indices=False):
            groups = real(lists, with_indices)
            return {
                (CUDA if device.type == "meta" else device, dtype): group for (device, dtype), group in groups.items()
            }

        self.set(torch._C, "_group_tensors_by_device_and_dtype", group)
        real_step = torch.amp.GradScaler._maybe_opt_step
        self.set(
            torch.amp.GradScaler,
            "_maybe_opt_step",
            lambda scaler, optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs),
        )
        del real_step

    # --- streams -------------------------------------------------------------------------------------------------

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


def _finite(real, answer: bool):
    """`math.isnan` and its kin, for which a number that nobody knows is an ordinary one."""
    return lambda x: answer if isinstance(x, values.Unknown) else real(x)


@contextmanager
def hosting(tracker):
    """Meta tensors made here are host tensors without values."""
    before, tracker.hosting = tracker.hosting, True
    try:
        yield
    finally:
        tracker.hosting = before


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
