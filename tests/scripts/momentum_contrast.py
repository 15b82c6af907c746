"""Momentum contrast: key encoder by deepcopy, a queue buffer written by slices at a pointer buffer. 3 steps."""

import copy

import torch
from torch import nn
from torch.nn import functional as F


class MoCo(nn.Module):
    def __init__(self, encoder, dim=128, K=4096, m=0.999, T=0.07):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.q, self.k = encoder, copy.deepcopy(encoder)
        for p in self.k.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum(self):
        for q, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _enqueue(self, keys):
        b = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.K % b == 0
        self.queue[:, ptr : ptr + b] = keys.T
        self.queue_ptr[0] = (ptr + b) % self.K

    def forward(self, im_q, im_k):
        q = F.normalize(self.q(im_q), dim=1)
        with torch.no_grad():
            self._momentum()
            idx = torch.randperm(im_k.shape[0], device=im_k.device)
            k = F.normalize(self.k(im_k[idx]), dim=1)
            k = k[torch.argsort(idx)]
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long).cuda()
        self._enqueue(k)
        return logits, labels


torch.manual_seed(0)
encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 1024), nn.ReLU(), nn.Linear(1024, 128))
model = MoCo(encoder).cuda()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.03, momentum=0.9, weight_decay=1e-4)
for step in range(3):
    a, b = torch.randn(256, 3, 32, 32).cuda(non_blocking=True), torch.randn(256, 3, 32, 32).cuda(non_blocking=True)
    logits, labels = model(a, b)
    loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), "pointer", int(model.queue_ptr), (logits.argmax(1) == labels).float().mean().item())
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
