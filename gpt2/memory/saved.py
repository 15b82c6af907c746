"""What a model keeps for backward, counted by hooks and not by hand: each storage once, its own weights left out.

Works on tensors of any device, the simulated card's too: nothing is copied, no value is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pandas as pd
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class Saved(NamedTuple):
    """One storage that the graph keeps alive."""

    module: str  # whose forward saved it first
    made_by: str  # the module whose output it is, or else the autograd node, or "" for what autograd did not make
    shape: tuple[int, ...]  # as first saved
    dtype: str
    storage_bytes: int
    uses: int  # how often it is saved: a tensor may serve two operators


def saved_tensors(model: nn.Module, *inputs: Tensor) -> pd.DataFrame:
    """Run `model(*inputs)` forward and list what autograd keeps, in order: a row per storage, columns as in `Saved`.

    Module names are paths inside `model`, "" for itself. Of a checkpointed module there is its input, nothing else.
    """
    known = {_storage(t) for t in (*model.parameters(), *model.buffers())}
    path: list[str] = []
    found: dict[int, Saved] = {}
    outputs: dict[int, str] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key in found:
            found[key] = found[key]._replace(uses=found[key].uses + 1)
        elif key not in known and tensor.untyped_storage().nbytes():
            node = tensor.grad_fn.name() if tensor.grad_fn is not None else ""
            found[key] = Saved(path[-1], outputs.get(key, node), tuple(tensor.shape),
                               str(tensor.dtype).removeprefix("torch."), tensor.untyped_storage().nbytes(), 1)
        return tensor

    with _following(model, path, outputs), saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model(*inputs)  # the graph lives as long as this does: until then no storage's key is used again
        # An output is often saved before its module has returned: look again at whose it is.
        rows = [saved._replace(made_by=outputs.get(key, saved.made_by)) for key, saved in found.items()]
    del kept
    return pd.DataFrame(rows, columns=Saved._fields)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _following(model: nn.Module, path: list[str], outputs: dict[int, str]) -> Iterator[None]:
    """While this lasts, `path` ends with the module at work, and `outputs` names the maker of each storage returned."""
    handles, seen = [], []  # a storage seen weakly may die, but its key is not given to another

    def leave(name):
        def hook(module, args, output):
            path.pop()
            if isinstance(output, Tensor):
                seen.append(StorageWeakRef(output.untyped_storage()))
                outputs.setdefault(_storage(output), name)
        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda module, args, name=name: path.append(name)))
        handles.append(module.register_forward_hook(leave(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
