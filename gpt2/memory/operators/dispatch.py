"""The ear of the simulator: every operator that reaches a kernel passes here.

A tensor of the simulated card is a meta tensor whose storage is known to the card. A storage that appears is an
allocation, a storage that dies is a free. Meta tensors the card does not know are host tensors without values
(parameters before `.cuda()`, and large float tensors, so that a model of any size costs no host memory), or the
program's own meta tensors, which it made with device="meta": `own_meta` lists their storages.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gpt2.memory import values
from gpt2.memory.kernels import scratch, shapes
from gpt2.memory.operators.known import Known

if TYPE_CHECKING:
    from gpt2.memory.simulator import SimulatedGpu

aten = torch.ops.aten
META, CPU = torch.device("meta"), torch.device("cpu")
HOST_VALUES_LIMIT = 16_384  # elements: a larger float tensor made on the host has no values
_device_of = torch._C.TensorBase.device.__get__
_in_backward = torch._C._current_graph_task_id
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by torch.func: such a tensor has no storage
_unwrapped = torch._C._functorch.get_unwrapped
_HOST_FACTORIES = {
    aten.empty.memory_format,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.rand.default,
    aten.randn.default,
    aten.randn.generator,
    aten.rand.generator,
    aten.empty_strided.default,
}


class Life(weakref.ref):
    """Watches a storage; when it dies its block is freed."""

    __slots__ = ("key", "address")


class Tracker(TorchDispatchMode):
    """Turns storages into blocks of `card`, and asks `scratch` for what kernels take besides their outputs."""

    def __init__(self, card: SimulatedGpu):
        super().__init__()
        self.card = card
        self.hosting = False  # tensors made on meta are meant for the host
        self.meta_meant = False  # tensors made on meta are meant to be there
        self.numbers_stay = False  # a number made a tensor stays on the host
        self.inside = False  # a kernel is running: PyTorch's own meta kernels must see meta tensors as such
        self.live: dict[int, Life] = {}
        self.own_meta: dict[int, Life] = {}
        self.known = Known(self.live)
        self.alone_uses = uses_of_a_lone_gradient()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.inside = True
        try:
            return self._dispatch(func, args, kwargs or {})
        except NotImplementedError as error:
            if "Meta tensors" not in str(error):
                raise
            name = func._schema.name.partition("::")[2].strip("_")
            raise values.unsupported(f"torch.{name}", "PyTorch cannot tell its results without values") from None
        finally:
            self.inside = False

    def _dispatch(self, func, args, kwargs):
        device = kwargs.get("device")
        if device is not None:
            if device.type == "cuda":
                if device.index:
                    raise RuntimeError("CUDA error: invalid device ordinal (the simulated machine has one GPU, cuda:0)")
                kwargs = {**kwargs, "device": META}
                if func is aten._to_copy.default:
                    return self._to_card(args, kwargs)
                return self._run(func, args, kwargs)
            if device.type == "meta" and not self.hosting:
                if self.meta_meant:
                    return self.keep_apart(func(*args, **kwargs))
                if self.numbers_stay and func is aten.scalar_tensor.default:
                    return func(*args, **{**kwargs, "device": CPU})
                if not any(isinstance(a, torch.Tensor) for a in args):
                    return self._run(func, args, kwargs)  # a composite made it with the options of a tensor of the card
            if device.type == "cpu" and func is aten._to_copy.default and self.knows(args[0]):
                if not kwargs.get("non_blocking"):
                    self.card.wait_for_stream()
                return values.to_host(args[0], kwargs, self.known.value(args[0]))
        if func in _HOST_FACTORIES and not self._keeps_values(args, kwargs):
            return func(*args, **{**kwargs, "device": META, "pin_memory": False})
        if self._among(self.live, args):
            if func is aten.copy_.default and _device_of(args[0]).type == "cpu":
                self.card.wait_for_stream()
                return values.forget(args[0], self.known.value(args[1]))
            return self._run(func, args, kwargs)
        return self._on_host(func, args, kwargs)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lives on the simulated card."""
        while _is_wrapped(tensor):
            tensor = _unwrapped(tensor)
        return _device_of(tensor) is not None and tensor.untyped_storage()._cdata in self.live

    def block(self, tensor: torch.Tensor) -> int:
        """Simulated address of the tensor's storage; 0 if it is not on the card."""
        life = self.live.get(tensor.untyped_storage()._cdata)
        return life.address if life else 0

    def address(self, storage: torch.UntypedStorage) -> int:
        """Where a storage without values begins: on the card, on meta (0), or at a number that is its own."""
        life = self.live.get(storage._cdata)
        return life.address if life else 0 if storage._cdata in self.own_meta else storage._cdata

    def adopt(self, tensor: torch.Tensor) -> None:
        """Give the tensor's storage a block, unless it has one. An empty storage has the address 0."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        life = self.live.get(key)
        if life is not None and (life.address or not storage.nbytes()):
            return
        card = self.card
        card.shape, card.dtype = tensor.shape, tensor.dtype
        address = card.malloc(size) if (size := storage.nbytes()) else 0
        if life is None:
            life = Life(storage, self._died)
        life.key, life.address = key, address
        self.live[key] = life

    def _died(self, life: Life) -> None:
        if self.live.pop(life.key, None) is not None:
            self.known.contents.pop(life.key, None)
            if life.address:
                self.card.free(life.address)

    def is_own_meta(self, tensor: torch.Tensor) -> bool:
        """Whether the program made this meta tensor as such."""
        while _is_wrapped(tensor):
            tensor = _unwrapped(tensor)
        return tensor.untyped_storage()._cdata in self.own_meta

    def keep_apart(self, out):
        """These meta tensors are the program's own."""
        for tensor in (out,) if isinstance(out, torch.Tensor) else out if isinstance(out, list | tuple) else ():
            if isinstance(tensor, torch.Tensor) and _device_of(tensor).type == "meta":
                storage = tensor.untyped_storage()
                life = Life(storage, lambda life: self.own_meta.pop(life.key, None))
                life.key = storage._cdata
                self.own_meta.setdefault(life.key, life)
        return out

    def _run(self, func, args, kwargs):
        card = self.card
        card.operator = func
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        if card.labels.path:
            card.labels.note_node()
        rule = scratch.RULES.get(func)
        if rule is not None:
            out = rule(self, func, args, kwargs)
        else:
            out = self.outputs(shapes.call(func, args, kwargs))
        self.known.follow(func, args, kwargs, out)
        return out

    def outputs(self, out):
        """Adopt what an operator returned, in order, and return it."""
        if isinstance(out, torch.Tensor):
            if _device_of(out).type == "meta":
                self.adopt(out)
        elif isinstance(out, tuple | list):
            for item in out:
                if isinstance(item, torch.Tensor) and _device_of(item).type == "meta":
                    self.adopt(item)
        return out

    def only_the_engine_holds(self, args, kwargs) -> bool:
        """Whether a gradient that is about to be added to has no other holder than the autograd engine."""
        old, new = args[:2]
        if kwargs or not isinstance(new, torch.Tensor) or torch.is_grad_enabled() or old.shape != new.shape:
            return False
        if old.dtype != new.dtype or not scratch.dense(old):
            return False
        return _holders(old) == self.alone_uses

    @staticmethod
    def _among(storages, args) -> bool:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if arg.untyped_storage()._cdata in storages:
                    return True
            elif isinstance(arg, list | tuple):
                for item in arg:
                    if isinstance(item, torch.Tensor) and item.untyped_storage()._cdata in storages:
                        return True
        return False

    def _to_card(self, args, kwargs):
        self.card.operator = aten._to_copy.default
        source = args[0]
        if self.is_own_meta(source):
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        valueless = _device_of(source).type == "meta"
        out = self.outputs(aten._to_copy.default(source if valueless else source.to(META), **kwargs))
        if not kwargs.get("non_blocking"):
            self.card.wait_for_stream()
        if not valueless:
            self.known.note(out, source)
        return out

    def _on_host(self, func, args, kwargs):
        """A host operator; if one of its tensors has no values, none has."""
        found = set()
        tree_map_only(torch.Tensor, lambda t: found.add(_device_of(t).type), (args, kwargs))
        if found == {"meta", "cpu"}:
            if func is aten.copy_.default and _device_of(args[0]).type == "cpu":
                return values.forget(args[0])
            args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(META), (args, kwargs))
        if found and "meta" in found and func is aten._local_scalar_dense.default:
            return values.read(args[0])
        if "meta" in found and func is aten._to_copy.default and kwargs.get("device", META).type == "cpu":
            if self.is_own_meta(args[0]):
                raise NotImplementedError("Cannot copy out of meta tensor; no data!")
            kwargs = {**kwargs, "device": META}
        out = func(*args, **kwargs)
        return self.keep_apart(out) if self.own_meta and self._among(self.own_meta, args) else out

    @staticmethod
    def _keeps_values(args, kwargs) -> bool:
        if kwargs.get("device") is not None and kwargs["device"].type != "cpu":
            return True
        count = 1
        for n in args[0]:
            count *= n
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return count <= HOST_VALUES_LIMIT or not dtype.is_floating_point


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class _Probe(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.add.Tensor and _in_backward() != -1:
            self.seen = _holders(args[0])
        return func(*args, **(kwargs or {}))


@functools.cache
def uses_of_a_lone_gradient() -> tuple[int, int]:
    """Holders of a gradient that nothing but the engine holds, counted on a graph whose answer is known."""
    x = torch.empty(2, device=META, requires_grad=True)
    y = x * 1
    with _Probe() as probe:
        (y * 2 + y * 3).backward(torch.empty(2, device=META))
    return probe.seen
