"""The program's own meta tensors, told apart from those that stand for the card's and the host's."""

from __future__ import annotations

import torch
from torch.utils._device import DeviceContext, _device_constructors

from gpt2.memory.faces.face import META, Faces, real_device

_MAKERS = "empty empty_strided zeros ones full rand randn randint arange linspace eye tensor".split()
_MAKERS += [name + "_like" for name in "empty zeros ones full rand randn".split()]


def is_meta(device) -> bool:
    """Whether `device`, in any of the forms PyTorch takes, means no device at all."""
    return isinstance(device, str) and device == "meta" or isinstance(device, torch.device) and device.type == "meta"


class MetaFaces(Faces):
    """Ways to make a tensor on meta."""

    def _meta(self) -> None:
        """Constructors, `with torch.device("meta")`, `.to("meta")`."""
        for name in _MAKERS:
            self.set(torch, name, self._apart(getattr(torch, name)))
        real_call = DeviceContext.__torch_function__

        def call(context, func, types, args=(), kwargs=None):
            if context.device.type != "meta":
                return real_call(context, func, types, args, kwargs)
            out = self.meant(real_call, context, func, types, args, kwargs)
            makes = func in _device_constructors() and is_meta((kwargs or {}).get("device") or META)
            return self.card.tracker.keep_apart(out) if makes else out

        self.set(DeviceContext, "__torch_function__", call)
        real_to, tensor = torch.Tensor.to, torch.Tensor
        moving = False  # a default device leads the C++ call back here, with the device that was given to C++

        def to(t, *args, **kwargs):
            nonlocal moving
            target = kwargs.get("device", args[0] if args else None)
            apart = is_meta(target) and not moving
            if not apart or real_device(t).type == "meta" and self.card.tracker.is_own_meta(t):
                before, moving = moving, True
                try:
                    return real_to(t, *args, **kwargs)
                finally:
                    moving = before
            dtype = kwargs.get("dtype", next((a for a in args[1:] if isinstance(a, torch.dtype)), None))
            return self.meant(
                torch._C._VariableFunctions.empty_strided,
                t.shape,
                t.stride(),
                dtype=dtype or t.dtype,
                device=META,
                requires_grad=t.requires_grad and t.is_leaf,
            )

        self.set(tensor, "to", to)

    def meant(self, function, *args, **kwargs):
        """Call it: what it makes on meta is meant to be there."""
        tracker = self.card.tracker
        before, tracker.meta_meant = tracker.meta_meant, True
        try:
            return function(*args, **kwargs)
        finally:
            tracker.meta_meant = before

    def _apart(self, real):
        def make(*args, **kwargs):
            tracker = self.card.tracker
            if "device" in kwargs and is_meta(kwargs["device"]) and not (tracker.inside or tracker.hosting):
                return tracker.keep_apart(self.meant(real, *args, **kwargs))  # tensor() is not dispatched
            return real(*args, **kwargs)

        return make
