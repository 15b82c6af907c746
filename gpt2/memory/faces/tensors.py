"""The faces of a tensor: its device, where it goes, and what reading it gives."""

from __future__ import annotations

import math

import torch

from gpt2.memory import values
from gpt2.memory.faces.face import CPU, CUDA, META, Faces, checked, hosting, is_cuda, real_device


class TensorFaces(Faces):
    """Attributes of `torch.Tensor` that name the device or need a value."""

    def _tensors(self) -> None:
        tracker, tensor = self.card.tracker, torch.Tensor
        knows = tracker.knows

        def device(t):
            real = real_device(t)
            if tracker.inside or real.type != "meta":
                return real
            return CUDA if knows(t) else META if tracker.is_own_meta(t) else CPU

        def is_on_cuda(t):
            return not tracker.inside and real_device(t).type == "meta" and knows(t)

        real_to, real_item, real_repr, real_bool = tensor.to, tensor.item, tensor.__repr__, tensor.__bool__
        real_numpy, real_tolist = tensor.numpy, tensor.tolist

        def is_on_meta(t):
            return real_device(t).type == "meta" and (tracker.inside or tracker.is_own_meta(t))

        def place(t, target):
            """The device to give to C++, which knows the card's and valueless host tensors as meta."""
            on_card = is_on_cuda(t)
            if is_cuda(target):
                return META if on_card else checked(target)
            return META if not on_card and real_device(t).type == "meta" else target

        def to(t, *args, **kwargs):
            if args and isinstance(args[0], torch.Tensor):
                args = (device(args[0]), args[0].dtype, *args[1:])
            if args and not isinstance(args[0], torch.dtype):
                args = (place(t, args[0]), *args[1:])
            if kwargs.get("device") is not None:
                kwargs["device"] = place(t, kwargs["device"])
            return real_to(t, *args, **kwargs)

        def valueless(t):
            return real_device(t).type == "meta"

        def known(t):
            """The tensor itself if it has values, what is known of it if it has not, None if nothing is."""
            if not valueless(t):
                return t
            self.card.wait_for_stream()
            return tracker.known.value(t)

        def boolean(t):
            if (value := known(t)) is not None:
                return real_bool(value)
            if values.initialising():
                return False  # trunc_normal_ draws until no value is out of range
            if values.validating():
                return True
            raise values.branch("the truth of a tensor")

        def number(name):
            real = getattr(tensor, name)
            return lambda t: _refuse() if (value := known(t)) is None else real(value)

        def _refuse():
            raise values.branch("a number made of a tensor")

        def on_host(t):
            value = known(t)
            with hosting(tracker):
                return values.to_host(t, {}) if value is None else value

        self.set(tensor, "device", property(device))
        self.set(tensor, "is_cuda", property(is_on_cuda))
        self.set(tensor, "is_meta", property(is_on_meta))
        self.set(tensor, "is_cpu", property(lambda t: not is_on_cuda(t) and not is_on_meta(t)))
        self.set(tensor, "to", to)
        self.set(
            tensor,
            "cuda",
            lambda t, device=None, non_blocking=False, memory_format=torch.preserve_format: to(
                t, CUDA if device is None else device, non_blocking=non_blocking, memory_format=memory_format
            ),
        )
        self.set(tensor, "cpu", lambda t, memory_format=torch.preserve_format: to(t, CPU, memory_format=memory_format))
        self.set(tensor, "type_as", to)
        self.set(tensor, "item", lambda t: values.read(t) if (value := known(t)) is None else real_item(value))
        self.set(tensor, "tolist", lambda t: real_tolist(on_host(t)))
        self.set(tensor, "numpy", lambda t, *a, **k: real_numpy(on_host(t), *a, **k))
        self.set(tensor, "__bool__", boolean)
        for name in ("__int__", "__index__"):
            self.set(tensor, name, number(name))
        real_float = tensor.__float__
        self.set(
            tensor, "__float__", lambda t: values.number(t) if (value := known(t)) is None else real_float(value)
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
        self._addresses()
        self.set(tensor, "get_device", lambda t: 0 if is_on_cuda(t) else -1)
        self.set(tensor, "pin_memory", lambda t, device=None: t)
        self.set(tensor, "is_pinned", lambda t, device=None: not is_on_cuda(t))
        self.set(tensor, "record_stream", lambda t, stream: self.card.record_stream(t, stream))

    def _addresses(self) -> None:
        """Programs that save tell by their addresses which tensors share memory."""
        address, real_of_tensor = self.card.tracker.address, torch.Tensor.data_ptr
        real_of_storage = torch.UntypedStorage.data_ptr

        def data_ptr(t):
            if real_device(t).type != "meta":
                return real_of_tensor(t)
            begin = address(t.untyped_storage())
            return begin + t.storage_offset() * t.element_size() if begin else 0

        self.set(torch.Tensor, "data_ptr", data_ptr)
        self.set(
            torch.UntypedStorage,
            "data_ptr",
            lambda storage: address(storage) if storage.device.type == "meta" else real_of_storage(storage),
        )

    def _assigning(self) -> None:
        """`x[i] = number`: to a tensor of the card the number comes as a tensor of the host.

        python_variable_indexing.cpp, THPVariable_setitem.
        """
        tracker, tensor = self.card.tracker, torch.Tensor
        real, on_card = tensor.__setitem__, self._listed

        def assign(t, index, value):
            if real_device(t).type != "meta" or not tracker.knows(t):
                return real(t, index, value)
            index = on_card(index)
            if isinstance(value, torch.Tensor):
                return real(t, index, value)
            tracker.numbers_stay = True
            try:
                real(t, index, 0 if (unknown := isinstance(value, values.Unknown)) else value)
            finally:
                tracker.numbers_stay = False
            if unknown:
                tracker.known.forget(t)

        self.set(tensor, "__setitem__", assign)

    def _indexing(self) -> None:
        """`x[:, [0, 2]]`: a list of numbers becomes a tensor of the card, which autograd keeps like any index.

        python_variable_indexing.cpp, sequenceToVariable. C++ does it out of a dispatch mode's hearing.
        """
        tracker, tensor = self.card.tracker, torch.Tensor
        real, on_card = tensor.__getitem__, self._listed

        def item(t, index):
            if type(index) in (tuple, list) and real_device(t).type == "meta" and tracker.knows(t):
                index = on_card(index)
            return real(t, index)

        self.set(tensor, "__getitem__", item)

    @staticmethod
    def _listed(index):
        """The index, its lists of numbers on the card. A list of lists alone may mean a tuple: C++ decides."""
        if type(index) is tuple:
            if any(type(part) is list for part in index):
                return tuple(_brought(part) if type(part) is list else part for part in index)
        elif type(index) is list and all(isinstance(part, int | float) for part in index):
            return _brought(index)
        return index

    def _grouping(self) -> None:
        """Foreach code groups tensors by device in C++, which sees meta."""
        real = torch._C._group_tensors_by_device_and_dtype

        def group(lists, with_indices=False):
            groups = real(lists, with_indices)
            return {
                (CUDA if device.type == "meta" else device, dtype): group for (device, dtype), group in groups.items()
            }

        self.set(torch._C, "_group_tensors_by_device_and_dtype", group)


def _finite(real, answer: bool):
    """`math.isnan` and its kin, for which a number that nobody knows is an ordinary one."""
    return lambda x: answer if isinstance(x, values.Unknown) else real(x)


def _brought(numbers: list):
    """A tensor of the card; the list itself where it is not one of numbers. Without any, it is one of integers."""
    try:
        found = torch.tensor(numbers, device=CPU)
    except (TypeError, ValueError, RuntimeError):
        return numbers
    return (found if found.numel() else found.long()).to(CUDA)
