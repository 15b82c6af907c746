"""Train, save a checkpoint, build all again, load it with map_location, go on. 2 + 2 steps."""

import os
import tempfile

import torch
from torch import nn


def build():
    model = nn.Sequential(
        nn.Embedding(5000, 256), nn.Flatten(), nn.Linear(256 * 16, 1024), nn.GELU(), nn.Linear(1024, 5000)
    ).to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, first, steps):
    for step in range(first, first + steps):
        x, y = torch.randint(0, 5000, (128, 16)).cuda(), torch.randint(0, 5000, (128,)).cuda()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(f"step {step} loss {loss.item():.4f} lr {optimizer.param_groups[0]['lr']:.6f}")
    return step + 1


path = os.path.join(tempfile.mkdtemp(), "checkpoint.pt")
model, optimizer, scheduler = build()
step = train(model, optimizer, scheduler, 0, 2)
torch.save(
    {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    },
    path,
)
del model, optimizer, scheduler
print("after del", torch.cuda.memory_allocated())
model, optimizer, scheduler = build()
checkpoint = torch.load(path, map_location="cuda")
print("loaded", torch.cuda.memory_allocated())
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
scheduler.load_state_dict(checkpoint["scheduler"])
step = train(model, optimizer, scheduler, checkpoint["step"], 2)
other = torch.load(path, map_location="cpu", weights_only=True)
print(sorted(other), other["model"]["0.weight"].device)
os.remove(path)
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
