"""SimCLR: 2N x 2N similarities, boolean masks built from eye, logits[mask].view. 3 steps."""

import torch
from torch import nn
from torch.nn import functional as F

N, views, temperature = 256, 2, 0.07


def info_nce(features):
    labels = torch.cat([torch.arange(N) for _ in range(views)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float().cuda()
    features = F.normalize(features, dim=1)
    similarity = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool).cuda()
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity = similarity[~mask].view(similarity.shape[0], -1)
    positives = similarity[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1) / temperature
    return logits, torch.zeros(logits.shape[0], dtype=torch.long).cuda()


torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 128)).cuda()
optimizer = torch.optim.Adam(model.parameters(), 3e-4, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cuda", enabled=True)
for step in range(3):
    images = torch.cat([torch.randn(N, 3, 32, 32) for _ in range(views)], dim=0).cuda()
    with torch.autocast("cuda"):
        logits, labels = info_nce(model(images))
        loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), logits.shape)
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
