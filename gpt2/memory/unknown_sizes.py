"""Operators whose result's size, or the program's course, depends on values that a simulation does not have."""

from __future__ import annotations

import torch

from gpt2.memory import shapes, values
from gpt2.memory.scratch import rule

aten = torch.ops.aten


@rule(
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.unique_dim_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
    aten.allclose.default,
    aten.is_nonzero.default,
)
def refuse(tracker, func, args, kwargs):
    """The error names the program's line."""
    raise values.branch(f"torch.{func._schema.name.partition('::')[2].strip('_').rstrip('2')}")


@rule(aten.index.Tensor)
def index(tracker, func, args, kwargs):
    """A mask as index selects as many elements as it has True."""
    for chosen in args[1]:
        if chosen is not None and chosen.dtype in (torch.bool, torch.uint8):
            raise values.branch("indexing with a mask")
    return tracker.outputs(shapes.call(func, args, kwargs))
