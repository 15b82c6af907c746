"""Guards that people write against bad numbers: isnan, isfinite, math.isnan, anomaly of gradients. 3 steps."""

import math
import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
skipped = 0
for step in range(3):
    x = torch.randn(1024, 512, device="cuda")
    loss = nn.functional.mse_loss(model(x), x)
    if torch.isnan(loss):
        print("loss is nan")
        break
    if not torch.isfinite(loss):
        continue
    if torch.isnan(loss).any() or loss.isinf():
        break
    if not math.isfinite(loss.item()):
        print(f"Loss is {loss.item()}, stopping training")
        sys.exit(1)
    loss.backward()
    bad = any(torch.isnan(p.grad).any() for p in model.parameters() if p.grad is not None)
    if bad or not all(torch.isfinite(p.grad).all() for p in model.parameters()):
        skipped += 1
        optimizer.zero_grad()
        continue
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    print(f"{step} loss {loss:.4f} norm {norm:.3f}")
print("skipped", skipped)
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
