"""What of several processes, several GPUs and compiled kernels there is on one simulated GPU."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map_only

from gpt2.memory import values
from gpt2.memory.faces.face import CUDA, Faces


class ParallelFaces(Faces):
    """DataParallel on the one card, torch.distributed refused, torch.compile as eager."""

    def _data_parallel(self) -> None:
        """A batch of the host is copied on a stream of its own. parallel/_functions.py, Scatter; comm.cpp, scatter."""
        stream = None

        def copied(tensor):
            nonlocal stream
            if tensor.is_cuda:
                return tensor
            stream = stream or torch.cuda.Stream()
            with torch.cuda.stream(stream):
                tensor = tensor.to(CUDA, non_blocking=True)
            tensor.record_stream(torch.cuda.current_stream())
            return tensor

        def scatter(module, inputs, kwargs, device_ids):
            return [tree_map_only(torch.Tensor, copied, inputs)], [tree_map_only(torch.Tensor, copied, kwargs or {})]

        self.set(torch.nn.DataParallel, "scatter", scatter)

    def _distributed(self) -> None:
        """One process is simulated; what NCCL and the buckets of DistributedDataParallel take is not known."""
        from torch.nn.parallel import DistributedDataParallel

        def refuse(*args, **kwargs):
            why = "one process on one GPU is; leave out the process group and the wrapper, as for a single GPU"
            raise values.unsupported("torch.distributed on the GPU", why)

        if torch.distributed.is_available():
            real = torch.distributed.init_process_group

            def init(backend=None, *args, **kwargs):
                return real(backend, *args, **kwargs) if backend == "gloo" else refuse()

            self.set(torch.distributed, "init_process_group", init)
        self.set(DistributedDataParallel, "__init__", refuse)

    def _compiling(self) -> None:
        """torch.compile gives back what it got: which kernels a compiled model has, Inductor decides."""
        said = False

        def same(model):
            nonlocal said
            if not said:
                said = True
                values.warn("torch.compile is simulated as eager: a compiled model usually takes less memory")
            if isinstance(model, torch.nn.Module):
                object.__setattr__(model, "_orig_mod", model)  # programs take it off again before they save
            return model

        self.set(torch, "compile", lambda model=None, **options: same if model is None else same(model))
