"""What the host does for the card: making tensors, parameters, files and batches of data."""

from __future__ import annotations

import inspect
import os

import torch
from torch.utils._device import DeviceContext

from gpt2.memory.faces.face import CPU, CUDA, Faces, checked, hosting, is_cuda, real_device


class HostFaces(Faces):
    """Constructors, parameters, saved files and data loaders."""

    def _constructors(self) -> None:
        """`torch.tensor(..., device="cuda")` makes a host tensor and moves it: there a device needs its index."""
        torch.utils._device._device_constructors()  # remembered now, with PyTorch's own functions
        for name in ("tensor", "as_tensor", "asarray", "scalar_tensor"):
            real = getattr(torch, name)

            def construct(*args, _real=real, **kwargs):
                if "device" in kwargs:
                    kwargs["device"] = checked(kwargs["device"])
                return _real(*args, **kwargs)

            self.set(torch, name, construct)

        real_init = DeviceContext.__init__
        self.set(DeviceContext, "__init__", lambda self, device: real_init(self, checked(torch.device(device))))
        real_default = torch._C._set_only_lift_cpu_tensors
        real_default(True)
        self.undo.callback(real_default, False)

    def _scripting(self) -> None:
        """`torch.jit.script` leaves Python as it is, as PYTORCH_JIT=0 does: TorchScript knows nothing of faces."""
        self.set(torch.jit._state._enabled, "enabled", False)

    def _parameters(self) -> None:
        """Parameters made while a GPU is simulated have no values, so that moving them keeps their identity."""
        real_new, tracker = torch.nn.Parameter.__new__, self.card.tracker

        def new(cls, data=None, requires_grad=True):
            if isinstance(data, torch.Tensor) and real_device(data).type == "cpu" and data.dtype.is_floating_point:
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
        self._one_thread()

    def _one_thread(self) -> None:
        """Operators are heard in one thread: transformers' threads that load weights are asked to stay away."""
        name = "HF_DEACTIVATE_ASYNC_LOAD"  # core_model_loading.py
        if name not in os.environ:
            os.environ[name] = "1"
            self.undo.callback(os.environ.pop, name, None)
