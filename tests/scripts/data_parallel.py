"""nn.DataParallel on the one GPU there is. 3 steps."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 10))
print("Let's use", torch.cuda.device_count(), "GPUs!")
model = nn.DataParallel(model, device_ids=[0]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, y = torch.randn(256, 1024), torch.randint(0, 10, (256,)).cuda()
    loss = nn.functional.cross_entropy(model(x), y).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
torch.save(model.module.state_dict(), "/dev/null")
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
