"""Per-sample gradients with torch.func (functional_call, grad, vmap), then a private update. 2 steps."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
params = {k: v.detach() for k, v in model.named_parameters()}


def loss_fn(params, x, y):
    return nn.functional.cross_entropy(functional_call(model, params, (x.unsqueeze(0),)), y.unsqueeze(0))


per_sample = vmap(grad(loss_fn), in_dims=(None, 0, 0))
for step in range(2):
    x, y = torch.randn(128, 256).cuda(), torch.randint(0, 10, (128,)).cuda()
    grads = per_sample(params, x, y)
    norms = torch.sqrt(sum(g.flatten(1).pow(2).sum(1) for g in grads.values()))
    scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for k, g in grads.items():
        g = (g * scale.view(-1, *[1] * (g.dim() - 1))).mean(0)
        params[k] = params[k] - 0.1 * g
    print(step, norms.mean().item())
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
