"""The faces a program sees while a GPU is simulated.

`torch._C._cuda_*` is where `torch.cuda` meets the driver: those functions are replaced, so that everything above them
(memory_summary, mem_get_info, autocast, GradScaler, ...) is PyTorch's own code. Tensor attributes that name the device
are replaced on `torch.Tensor`. `Patches` undoes it all.
"""

from __future__ import annotations

from gpt2.memory.faces.cuda import CudaFaces
from gpt2.memory.faces.engine import EngineFaces
from gpt2.memory.faces.files import FileFaces
from gpt2.memory.faces.host import HostFaces
from gpt2.memory.faces.meta import MetaFaces
from gpt2.memory.faces.parallel import ParallelFaces
from gpt2.memory.faces.tensors import TensorFaces


class Patches(CudaFaces, TensorFaces, EngineFaces, HostFaces, MetaFaces, FileFaces, ParallelFaces):
    """Everything that is replaced, and how it is put back."""

    def install(self) -> None:
        """Put on every face."""
        for put_on in (
            self._driver,
            self._accelerator,
            self._streams,
            self._tensors,
            self._assigning,
            self._indexing,
            self._grouping,
            self._engine,
            self._constructors,
            self._scripting,
            self._meta,
            self._parameters,
            self._files,
            self._loaders,
            self._archives,
            self._safetensors,
            self._data_parallel,
            self._distributed,
            self._compiling,
        ):
            put_on()

    def remove(self) -> None:
        """Take them all off, in reverse."""
        self.undo.close()
