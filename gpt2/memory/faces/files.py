"""Files of tensors: shapes and types are written, and contents that do not exist are a hole of the file's.

Such a file is as long as a real one and takes no room on disk; read again, what is in the hole is zeros.
"""

from __future__ import annotations

import importlib.util
import json

import torch

from gpt2.memory import values
from gpt2.memory.faces.face import Faces, real_device

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class FileFaces(Faces):
    """Saving with PyTorch, and with safetensors where it is installed."""

    _said = False

    def _hole(self) -> None:
        if not self._said:
            self._said = True
            values.warn("a file is saved of simulated tensors: it has zeros for contents nobody knows (said once)")

    def _archives(self) -> None:
        """torch.save asks storages for their bytes, one after another."""
        serialization, storage = torch.serialization, torch.UntypedStorage
        hole = self._hole
        real_save, real_cpu, known = serialization._save, storage.cpu, self.card.tracker.known

        class Archive:
            """A writer that leaves a hole where a storage has no contents."""

            def __init__(self, file):
                self.file = file

            def __getattr__(self, name):
                return getattr(self.file, name)

            def write_record(self, name, data, size):
                if isinstance(data, storage) and data.device.type == "meta":
                    hole()
                    return self.file.write_record_metadata(name, size)
                return self.file.write_record(name, data, size)

        def cpu(data):
            if data.device.type != "meta":
                return real_cpu(data)
            content = known.contents.get(data._cdata)
            return data if content is None else content.contiguous().untyped_storage()

        self.set(serialization, "_save", lambda obj, file, *args: real_save(obj, Archive(file), *args))
        self.set(storage, "cpu", cpu)

    def _safetensors(self) -> None:
        """A file with a tensor without values is written here: reading it gives zeros."""
        if importlib.util.find_spec("safetensors") is None:
            return
        import safetensors.torch as module

        real_flatten, real_write = module._flatten_as_ptr, module.serialize_file

        def flatten(tensors, *rest):
            valueless = any(real_device(tensor).type == "meta" for tensor in tensors.values())
            return dict(tensors) if valueless else real_flatten(tensors, *rest)

        def write(tensors, filename, metadata=None):
            if not any(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
                return real_write(tensors, filename, metadata=metadata)
            self._hole()
            header, end = {"__metadata__": metadata} if metadata else {}, 0
            for name, tensor in tensors.items():
                place = [end, end := end + tensor.numel() * tensor.element_size()]
                header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            with open(filename, "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.truncate(8 + len(text) + end)

        self.set(module, "_flatten_as_ptr", flatten)
        self.set(module, "serialize_file", write)
