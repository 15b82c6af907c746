"""Operators whose result's size, or the program's course, depends on values: known ones are used, others refused."""

from __future__ import annotations

import torch

from gpt2.memory import values
from gpt2.memory.scratch import rule

aten = torch.ops.aten

@rule(
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.unique_dim_consecutive.default,
    aten.bincount.default,
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


def _on_card(tracker, found):
    """What was found on the host, as tensors of the card with known contents."""
    if isinstance(found, tuple | list):
        return type(found)(_on_card(tracker, item) for item in found)
    if not isinstance(found, torch.Tensor):
        return found
    tensor = tracker.outputs(torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="meta"))
    tracker.known.note(tensor, found)
    return tensor
