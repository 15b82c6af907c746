"""Values that are known without computing: counts, positions and masks.

Programs look at integers and booleans to decide what to do (is any token masked? which rows are padding?). Where such a
tensor of the card comes from the host, from a constant, or from others that are known, its contents are followed on the
host, storage by storage; views see the same contents. Random numbers and large tensors are not followed.

A constant is one element stretched over its storage, whatever its size, and stays so through pointwise operators.

Floats are taken to be finite: asked whether they are (`isnan`, `isinf`, `isfinite`, the check of a GradScaler), they
say yes, so that a program's guards against bad numbers let it go on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container

import torch
from torch.utils._pytree import tree_map_only

LARGEST = 1_048_576  # elements that are followed at most, unless all are the same
aten = torch.ops.aten
_CONSTANTS = {
    aten.ones.default,
    aten.zeros.default,
    aten.full.default,
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
}
CPU = torch.device("cpu")
_real_device = torch._C.TensorBase.device.__get__


_EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
}


@functools.cache
def _written(func) -> tuple[int, ...]:
    """Places of the arguments that an operator writes to."""
    arguments = func._schema.arguments
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def _finite(func, args) -> bool | None:
    """What an operator that asks for bad numbers answers for finite ones; None if it asks for something else.

    UnaryOps and TensorCompare.cpp: isnan is x != x; isinf is |x| == inf; isfinite is (x == x) * (|x| != inf).
    """
    equal = func is aten.eq.Tensor or func is aten.eq.Scalar
    other = args[1] if len(args) > 1 else None
    if other is None:
        return False
    if other is args[0] or isinstance(other, float) and other == math.inf:
        return equal == (other is args[0])
    return None


_MOVES = {overload for name in aten.set_.overloads() if (overload := getattr(aten.set_, name))}
_FILL = {aten.zero_.default, aten.fill_.Scalar}
_ASK_FINITE = {aten.isnan.default, aten.isinf.default, aten.eq.Tensor, aten.ne.Tensor, aten.eq.Scalar, aten.ne.Scalar}


class _Unknown(Exception):
    """An argument's contents are not known."""


class Known:
    """Contents by storage of the card: a one-dimensional host tensor each, of stride 0 if all elements are the same.

    Args:
        live: the storages of the card; of others nothing is kept.
    """

    def __init__(self, live: Container[int]):
        self.contents: dict[int, torch.Tensor] = {}
        self.live = live

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The contents of a tensor of the card, as a view on the host; None if nobody knows them."""
        content = self.contents.get(tensor.untyped_storage()._cdata)
        if content is None or content.dtype is not tensor.dtype:
            return None
        if not content.stride(0):
            return content.as_strided(tensor.shape, (0,) * tensor.dim())
        return content.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def note(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """From now on the contents of `tensor`'s storage are known."""
        if tensor.dtype.is_complex or not 0 < tensor.numel() <= LARGEST:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self.live:
            return
        content = torch.zeros(storage.nbytes() // tensor.element_size(), dtype=tensor.dtype)
        content.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(value)
        self.contents[storage._cdata] = content

    def note_uniform(self, tensor: torch.Tensor, value: torch.Tensor | float) -> None:
        """From now on every element of `tensor`'s storage is `value`."""
        storage = tensor.untyped_storage()
        if tensor.numel() and not tensor.dtype.is_complex and storage._cdata in self.live:
            one = torch.as_tensor(value, dtype=tensor.dtype, device=CPU).reshape(1)
            self.contents[storage._cdata] = one.expand(storage.nbytes() // tensor.element_size())

    def follow(self, func, args, kwargs, out) -> None:
        """An operator has run on the card: do the same on the host where everything it read is known."""
        written = _written(func)
        if written and func in _MOVES:
            return
        if self._reads_unknown(args) and func not in _CONSTANTS:
            if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
                return self.forget(args[0])  # and found_inf stays
            for place in written:
                self.forget(args[place] if place < len(args) else None)
            if func in _ASK_FINITE and args[0].dtype.is_floating_point and (finite := _finite(func, args)) is not None:
                self.note_uniform(out, finite)
            elif func in _FILL and out.nbytes == out.untyped_storage().nbytes():
                self.note_uniform(out, args[1] if len(args) > 1 else 0)
            return
        results = [out] if isinstance(out, torch.Tensor) else out if isinstance(out, list | tuple) else ()
        results = [result for result in results if isinstance(result, torch.Tensor)]
        if written:
            if self._spread(args[place] for place in written if place < len(args)):
                self.on_host(func, args, kwargs)
        elif not results or func in _EMPTY or torch.Tag.nondeterministic_seeded in func.tags:
            return
        elif func in _CONSTANTS:
            full = func._schema.name.startswith("aten::full")
            self.note_uniform(results[0], args[1] if full else int("ones" in func._schema.name))
        elif all(r.untyped_storage()._cdata in self.contents for r in results):
            return  # a view
        elif torch.Tag.pointwise in func.tags and len(results) == 1 and self._uniform(args):
            self.note_uniform(out, self.on_host(func, *tree_map_only(torch.Tensor, self._first, (args, kwargs))))
        elif not any(r.numel() > LARGEST for r in results):
            done = self.on_host(func, args, kwargs)
            for tensor, value in zip(results, [done] if isinstance(done, torch.Tensor) else done, strict=True):
                self.note(tensor, value)

    def _uniform(self, args) -> bool:
        """Whether all elements of every tensor among the arguments are the same."""
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.numel() > 1:
                content = self.contents.get(arg.untyped_storage()._cdata)
                if content is None or content.stride(0):
                    return False
            elif isinstance(arg, list | tuple) and not self._uniform(arg):
                return False
        return True

    def _spread(self, written) -> bool:
        """Give every element a place of its own, so that some can be written; False if they are too many."""
        for tensor in written:
            if isinstance(tensor, list | tuple):
                if not self._spread(tensor):
                    return False
                continue
            key = tensor.untyped_storage()._cdata
            content = self.contents.get(key)
            if content is not None and not content.stride(0):
                if content.numel() > LARGEST:
                    self.forget(tensor)
                    return False
                self.contents[key] = content.contiguous()
        return True

    def _first(self, tensor: torch.Tensor) -> torch.Tensor:
        """The one element of a uniform tensor, with a dimension if the tensor has any: types are promoted by that."""
        value = self._host(tensor)
        return value.as_strided((1,) if value.dim() else (), (1,) if value.dim() else ())

    def _reads_unknown(self, args) -> bool:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if _real_device(arg).type == "meta":
                    content = self.contents.get(arg.untyped_storage()._cdata)
                    if content is None or content.dtype is not arg.dtype:
                        return True
            elif isinstance(arg, list | tuple) and self._reads_unknown(arg):
                return True
        return False

    def forget(self, written) -> None:
        """Nobody knows any more what is in this tensor, or these."""
        if isinstance(written, torch.Tensor):
            self.contents.pop(written.untyped_storage()._cdata, None)
        elif isinstance(written, list | tuple):
            for item in written:
                self.forget(item)

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
