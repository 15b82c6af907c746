"""Indexing by positions and masks: `x[i]`, `x[mask]`, `x[i] = y`, nonzero. TensorAdvancedIndexing.cpp and its kin.

How many elements a mask selects must be known, except where they are written to: there the values tell, and a single
value is taken to go everywhere.
"""

from __future__ import annotations

import math

import torch

from gpt2.memory import values
from gpt2.memory.kernels import cub, shapes
from gpt2.memory.kernels.scratch import Temporaries, rule

aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)
_real_device = torch._C.TensorBase.device.__get__


def _on_host(tensor) -> bool:
    return _real_device(tensor).type == "cpu"


def _true(tracker, mask) -> int | None:
    """How many elements of a mask are not zero; None if nobody knows."""
    known = mask if _on_host(mask) else tracker.known.value(mask)
    return None if known is None else int(known.count_nonzero())


def _nonzero(card, mask, count: int, temporaries) -> int:
    """Address of the positions of `count` elements. cuda/Nonzero.cu: CUB counts them, then selects them."""
    take, give = temporaries.take, temporaries.give
    temporaries.contiguous(mask)
    found = take(4)
    give(take(cub.total(mask.numel(), card.gpu)))
    card.wait_for_stream()  # the host reads how many
    positions = take(8 * mask.dim() * count)
    give(take(cub.select(mask.numel(), card.gpu.capability)))
    give(found)
    return positions


@rule(aten.nonzero.default)
def nonzero(tracker, func, args, kwargs):
    """A table with a row for each element: stored column by column."""
    mask, card = args[0], tracker.card
    count = _true(tracker, mask)
    if count is None:
        raise values.branch("torch.nonzero")
    with Temporaries(card, "nonzero") as temporaries:
        take, give = temporaries.take, temporaries.give
        temporaries.contiguous(mask)
        take(4)
        give(take(cub.total(mask.numel(), card.gpu)))
        card.wait_for_stream()
        table = torch.empty((mask.dim(), count), dtype=torch.int64, device="meta").t()
        tracker.outputs(table)
        take(cub.select(mask.numel(), card.gpu.capability))
        return table


def _positions(tracker, indices, temporaries, values_given=None) -> list:
    """The indices as int64 tensors of the card, none a mask. IndexingUtils.h, expandTensors; make_info."""
    found, card = [], tracker.card
    for index in indices:
        if index is None:
            found.append(None)
        elif index.dtype in MASKS:
            count = _true(tracker, index)
            if count is None:
                if values_given is None:
                    raise values.branch("indexing with a mask")
                count = values_given.shape[0] if values_given.dim() else index.numel()
            if _on_host(index):
                temporaries.take(8 * index.dim() * count)
            else:
                _nonzero(card, index, count, temporaries)
            found += [torch.empty(count, dtype=torch.int64, device="meta") for _ in range(index.dim())]
        else:
            if _on_host(index):
                temporaries.take(index.numel() * index.element_size())
                index = torch.empty_strided(index.shape, index.stride(), dtype=index.dtype, device="meta")
            if index.dtype is torch.int32:
                temporaries.take(8 * index.numel())
                index = torch.empty(index.shape, dtype=torch.int64, device="meta")
            found.append(index)
    return found


def _lists(tracker, indices) -> list:
    """What C++ made of numbers is a tensor of the card, made before and unheard: sequenceToVariable."""
    for index in indices:
        if not (index is None or index.dtype in MASKS or _on_host(index) or tracker.knows(index)):
            tracker.adopt(index)
    return indices


def _same_strides(indices, temporaries) -> None:
    """Several indices that are laid out differently are made contiguous. AdvancedIndex."""
    given = torch.broadcast_tensors(*(index for index in indices if index is not None))
    if any(index.stride() != given[0].stride() for index in given):
        for index in given:
            if not index.is_contiguous():
                temporaries.take(8 * index.numel())


@rule(aten.index.Tensor)
def index(tracker, func, args, kwargs):
    """Positions first, then the output. A mask selects as many elements as it has True."""
    with Temporaries(tracker.card, "index: positions") as temporaries:
        found = _positions(tracker, _lists(tracker, args[1]), temporaries)
        _same_strides(found, temporaries)
        return tracker.outputs(shapes.call(func, (args[0], found), kwargs))


@rule(aten.masked_select.default)
def masked_select(tracker, func, args, kwargs):
    """An index by a mask of the tensor's shape. cuda/IndexKernel.cpp, masked_select_out_cuda_impl."""
    source, mask = torch.broadcast_tensors(*args[:2])
    return index(tracker, aten.index.Tensor, (source, [mask]), {})


def _fills(tracker, indices, new) -> bool:
    """Whether a number goes where one mask says: canDispatchToMaskedFill, which takes nothing."""
    given = [index for index in indices if index is not None]
    return _on_host(new) and new.numel() == 1 and len(given) == 1 and given[0].dtype in MASKS and not _on_host(given[0])


def _key_bits(target, chosen) -> int:
    """Bits of the largest row that indices can name. Indexing.cu: get_num_bits(largestIndex / sliceSize)."""
    indexed = math.prod(target.shape[d] for d, index in enumerate(chosen) if index is not None)
    return max(1, (indexed - 1).bit_length())


@rule(aten.index_put_.default, aten._index_put_impl_.default)
def index_put(tracker, func, args, kwargs):
    """A number of the host is brought to the card, then the positions; adding sorts them. _index_put_impl_."""
    target, chosen, new = args[:3]
    if not tracker.knows(target):
        return func(*args, **kwargs)
    chosen = _lists(tracker, chosen)
    accumulate = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    with Temporaries(tracker.card, "index put: positions") as temporaries:
        if not accumulate and _fills(tracker, chosen, new):
            return target
        if _on_host(new):
            temporaries.take(new.numel() * new.element_size())
        if accumulate:
            found = _sort(tracker, target, chosen, new, temporaries)
        else:
            found = _positions(tracker, chosen, temporaries, new)
            _same_strides(found, temporaries)
        return aten.index_put_.default(target, found, new.to("meta") if _on_host(new) else new, accumulate)


def _sort(tracker, target, chosen, new, temporaries) -> list:
    """The choices are sorted, so that equal ones meet. cuda/Indexing.cu, index_put_with_sort_kernel."""
    card, take, give = tracker.card, temporaries.take, temporaries.give
    linear = 0
    with Temporaries(card, "index put: positions") as passing:
        found = _positions(tracker, chosen, passing, new)
        given = [index for index in found if index is not None]
        n = math.prod(torch.broadcast_shapes(*(index.shape for index in given)))
        for _ in given:  # wrapped, times its stride, added up
            wrapped, stepped = take(8 * n), take(8 * n)
            give(wrapped)
            if linear:
                give(stepped)
            else:
                linear = stepped
    temporaries.contiguous(new)
    for _ in range(3):  # sorted, where they came from, counting
        take(8 * n)
    give(take(cub.radix_sort(n, card.gpu.capability, bits=_key_bits(target, found))))
    return found
