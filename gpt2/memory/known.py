"""Values that are known without computing: counts, positions and masks.

Programs look at integers and booleans to decide what to do (is any token masked? which rows are padding?). Where such a
tensor of the card comes from the host, from a constant, or from others that are known, its contents are followed on the
host, storage by storage; views see the same contents. Floats, random numbers and large tensors are not followed.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map_only

LARGEST = 1_048_576  # elements that are followed at most
CPU = torch.device("cpu")
_real_device = torch._C.TensorBase.device.__get__


class _Unknown(Exception):
    """An argument's contents are not known."""


class Known:
    """Contents by storage of the card: a one-dimensional host tensor each."""

    def __init__(self):
        self.contents: dict[int, torch.Tensor] = {}

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The contents of a tensor of the card, as a view on the host; None if nobody knows them."""
        content = self.contents.get(tensor.untyped_storage()._cdata)
        if content is None or content.dtype is not tensor.dtype:
            return None
        return content.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def note(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """From now on the contents of `tensor`'s storage are known."""
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or not 0 < tensor.numel() <= LARGEST:
            return
        storage = tensor.untyped_storage()
        content = torch.zeros(storage.nbytes() // tensor.element_size(), dtype=tensor.dtype)
        content.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(value)
        self.contents[storage._cdata] = content

    def follow(self, func, args, kwargs, out) -> None:
        """An operator has run on the card: do the same on the host where everything it read is known."""
        results = [out] if isinstance(out, torch.Tensor) else list(out)
        counted = [r for r in results if isinstance(r, torch.Tensor) and not r.dtype.is_floating_point]
        if not counted or not results or torch.Tag.nondeterministic_seeded in func.tags:
            return
        writes = func._schema.is_mutable
        if not writes and all(r.untyped_storage()._cdata in self.contents for r in counted):
            return  # a view
        try:
            done = self.on_host(func, args, kwargs)
        except _Unknown:
            if writes:
                self.contents.pop(counted[0].untyped_storage()._cdata, None)
            return
        if not writes:
            for tensor, value in zip(results, [done] if isinstance(done, torch.Tensor) else done, strict=True):
                self.note(tensor, value)

    def on_host(self, func, args, kwargs):
        """Run `func` on known contents. Raises `_Unknown` if some are not."""
        args, kwargs = tree_map_only(torch.Tensor, self._host, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **kwargs)

    def try_on_host(self, func, args, kwargs):
        """As `on_host`, None where something is unknown."""
        try:
            return self.on_host(func, args, kwargs)
        except _Unknown:
            return None

    def _host(self, tensor: torch.Tensor) -> torch.Tensor:
        if _real_device(tensor).type == "cpu":
            return tensor
        value = self.value(tensor)
        if value is None:
            raise _Unknown
        return value
