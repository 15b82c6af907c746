"""Values that are known without computing: counts, positions and masks.

Programs look at integers and booleans to decide what to do (is any token masked? which rows are padding?). Where such a
tensor of the card comes from the host, from a constant, or from others that are known, its contents are followed on the
host, storage by storage; views see the same contents. Random numbers and large tensors are not followed, and of floats
only small ones that began as a constant (a mask of ones).
"""

from __future__ import annotations

import functools

import torch
from torch.utils._pytree import tree_map_only

LARGEST = 1_048_576  # integers that are followed at most
LARGEST_FLOATS = 16_384
_CONSTANTS = {
    torch.ops.aten.ones.default,
    torch.ops.aten.zeros.default,
    torch.ops.aten.full.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.full_like.default,
}
CPU = torch.device("cpu")
_real_device = torch._C.TensorBase.device.__get__


_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten.empty_permuted.default,
}


@functools.cache
def _written(func) -> tuple[int, ...]:
    """Places of the arguments that an operator writes to."""
    arguments = func._schema.arguments
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def _largest(tensor: torch.Tensor) -> int:
    return LARGEST_FLOATS if tensor.dtype.is_floating_point else LARGEST


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
        if tensor.dtype.is_complex or not 0 < tensor.numel() <= _largest(tensor):
            return
        storage = tensor.untyped_storage()
        content = torch.zeros(storage.nbytes() // tensor.element_size(), dtype=tensor.dtype)
        content.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(value)
        self.contents[storage._cdata] = content

    def follow(self, func, args, kwargs, out) -> None:
        """An operator has run on the card: do the same on the host where everything it read is known."""
        written = _written(func)
        if self._reads_unknown(args) and func not in _CONSTANTS:
            for place in written:
                self._forget(args[place] if place < len(args) else None)
            return
        results = [out] if isinstance(out, torch.Tensor) else [o for o in out or () if isinstance(o, torch.Tensor)]
        if written:
            self.on_host(func, args, kwargs)
        elif any(r.numel() > _largest(r) for r in results):
            return
        elif not results or func in _EMPTY or torch.Tag.nondeterministic_seeded in func.tags:
            return
        elif func in _CONSTANTS:
            self._constant(func, args, results[0])
        elif not all(r.untyped_storage()._cdata in self.contents for r in results):  # else a view
            done = self.on_host(func, args, kwargs)
            for tensor, value in zip(results, [done] if isinstance(done, torch.Tensor) else done, strict=True):
                self.note(tensor, value)

    def _constant(self, func, args, out) -> None:
        if out.numel() <= LARGEST_FLOATS or not out.dtype.is_floating_point:
            full = func._schema.name.startswith("aten::full")
            value = args[1] if full else int("ones" in func._schema.name)
            self.note(out, torch.tensor(value, dtype=out.dtype).expand(out.shape))

    def _reads_unknown(self, args) -> bool:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if _real_device(arg).type == "meta" and arg.untyped_storage()._cdata not in self.contents:
                    return True
            elif isinstance(arg, list | tuple) and self._reads_unknown(arg):
                return True
        return False

    def _forget(self, written) -> None:
        if isinstance(written, torch.Tensor):
            self.contents.pop(written.untyped_storage()._cdata, None)
        elif isinstance(written, list | tuple):
            for item in written:
                self._forget(item)

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
