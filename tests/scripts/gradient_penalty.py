"""Wasserstein GAN with gradient penalty: autograd.grad with create_graph, double backward. 3 steps."""

import torch
from torch import autograd, nn

G = nn.Sequential(
    nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 784), nn.Tanh()
).cuda()
D = nn.Sequential(
    nn.Linear(784, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)
).cuda()
optG = torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9))
optD = torch.optim.Adam(D.parameters(), lr=1e-4, betas=(0.0, 0.9))


def gradient_penalty(real, fake, weight=10):
    alpha = torch.rand(real.size(0), 1, device=real.device)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    out = D(mixed)
    grads = autograd.grad(
        outputs=out,
        inputs=mixed,
        grad_outputs=torch.ones_like(out),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((grads.norm(2, dim=1) - 1) ** 2).mean() * weight


for step in range(3):
    for _ in range(2):
        real = torch.randn(512, 784).cuda()
        fake = G(torch.randn(512, 128, device="cuda")).detach()
        optD.zero_grad()
        d_real, d_fake = D(real).mean(), D(fake).mean()
        gp = gradient_penalty(real, fake)
        d_loss = d_fake - d_real + gp
        d_loss.backward()
        optD.step()
    optG.zero_grad()
    g_loss = -D(G(torch.randn(512, 128, device="cuda"))).mean()
    g_loss.backward()
    optG.step()
    print(f"{step} D {d_loss.item():.3f} G {g_loss.item():.3f} gp {gp.item():.3f}")
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
