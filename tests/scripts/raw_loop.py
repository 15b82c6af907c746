"""A training loop as a tutorial has it."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--gpu", default="mine")  # the script's own option, not ours
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, args.width), nn.ReLU(), nn.Linear(args.width, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(args.steps):
    x = torch.randn(512, 64, device="cuda")
    y = torch.randint(0, 10, (512,), device="cuda")
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}, {torch.cuda.memory_allocated()} bytes, --gpu {args.gpu}")
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
