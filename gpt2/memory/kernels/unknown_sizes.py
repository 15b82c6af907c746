"""Operators whose result's size, or the program's course, depends on values: known ones are used, others refused."""

from __future__ import annotations

import torch

from gpt2.memory import values
from gpt2.memory.kernels.scratch import rule

aten = torch.ops.aten


@rule(
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.unique_dim_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
    aten.allclose.default,
    aten.is_nonzero.default,
    aten._local_scalar_dense.default,
)
def ask(tracker, func, args, kwargs):
    """From known contents the result; else an error that names the program's line."""
    found = tracker.known.try_on_host(func, args, kwargs)
    if found is not None:
        return _on_card(tracker, found)
    raise values.branch(f"torch.{func._schema.name.partition('::')[2].strip('_').rstrip('2')}")


@rule(aten.bincount.default)
def bincount(tracker, func, args, kwargs):
    """Smallest and largest are read first. Of contents nobody knows, all are taken to be below `minlength`.

    cuda/SummaryOps.cu, _bincount_cuda_template.
    """
    source, weights = args[0], args[1] if len(args) > 1 else kwargs.get("weights")
    for read in (aten.min.default, aten.max.default):
        tracker._run(read, (source,), {})
    known, bins = tracker.known.value(source), args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    if known is None and not bins:
        raise values.branch("torch.bincount")
    bins = max(bins, int(known.max()) + 1 if known is not None and known.numel() else 0)
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return tracker.outputs(torch.empty(bins, dtype=dtype, device="meta"))


def _on_card(tracker, found):
    """What was found on the host, as tensors of the card with known contents."""
    if isinstance(found, tuple | list):
        return type(found)(_on_card(tracker, item) for item in found)
    if not isinstance(found, torch.Tensor):
        return found
    tensor = tracker.outputs(torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="meta"))
    tracker.known.note(tensor, found)
    return tensor
