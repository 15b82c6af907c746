"""Chooses allocator settings before it imports torch."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch  # noqa: E402

x = torch.ones(2**22, device="cuda")
print(torch.cuda.memory_reserved(), torch.cuda.memory.memory_snapshot()[0]["is_expandable"])
