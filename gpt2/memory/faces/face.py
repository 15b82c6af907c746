"""What every face shares: how something is replaced and put back, and which device a tensor really is on."""

from __future__ import annotations

import types
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gpt2.memory.simulator import SimulatedGpu

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
META = torch.device("meta")
_missing = object()
_device_getter = torch._C.TensorBase.device.__get__


def real_device(tensor: torch.Tensor) -> torch.device:
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


class Faces:
    """Replacements that are undone together, in reverse."""

    def __init__(self, card: SimulatedGpu):
        self.card = card
        self.undo = ExitStack()

    def set(self, owner, name: str, value) -> None:
        """Replace `owner.name` until `remove`."""
        old = owner.__dict__.get(name, _missing) if isinstance(owner, type | types.ModuleType) else getattr(owner, name)
        setattr(owner, name, value)
        self.undo.callback(delattr, owner, name) if old is _missing else self.undo.callback(setattr, owner, name, old)


@contextmanager
def hosting(tracker):
    """Meta tensors made here are host tensors without values."""
    before, tracker.hosting = tracker.hosting, True
    try:
        yield
    finally:
        tracker.hosting = before
