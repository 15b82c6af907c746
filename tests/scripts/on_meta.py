"""A model built on meta, given memory by to_empty, initialised on the GPU; sizes counted on a meta twin. 3 steps."""

import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self, d=1024, layers=6):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(d, d) for _ in range(layers)])
        self.register_buffer("steps", torch.zeros(1, dtype=torch.long))

    def reset_parameters(self):
        for layer in self.layers:
            nn.init.kaiming_uniform_(layer.weight, a=5**0.5)
            nn.init.zeros_(layer.bias)
        self.steps.zero_()

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


with torch.device("meta"):
    model = Mlp()
assert all(p.is_meta and p.device.type == "meta" and not p.is_cuda for p in model.parameters())
print("parameters", sum(p.numel() for p in model.parameters()), "allocated", torch.cuda.memory_allocated())
shape = model(torch.empty(4, 1024, device="meta"))
assert shape.is_meta and torch.cuda.memory_allocated() == 0, torch.cuda.memory_allocated()
model.to_empty(device="cuda")
model.reset_parameters()
print("given memory", torch.cuda.memory_allocated())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    x = torch.randn(256, 1024, device="cuda")
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.steps += 1
    print(int(model.steps), loss.item())
twin = torch.empty(2**34, device="meta")
print(twin.device, twin.shape, "peak of nothing")
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
