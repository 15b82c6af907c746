"""U-Net with one-hot Dice loss and a confusion matrix by bincount. 3 steps."""

import torch
from torch import nn
from torch.nn import functional as F

C = 21


def double(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1),
        nn.BatchNorm2d(b),
        nn.ReLU(inplace=True),
        nn.Conv2d(b, b, 3, padding=1),
        nn.BatchNorm2d(b),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, w=32):
        super().__init__()
        self.d1, self.d2, self.d3 = double(3, w), double(w, 2 * w), double(2 * w, 4 * w)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.u2 = nn.ConvTranspose2d(4 * w, 2 * w, 2, 2), double(4 * w, 2 * w)
        self.up1, self.u1 = nn.ConvTranspose2d(2 * w, w, 2, 2), double(2 * w, w)
        self.out = nn.Conv2d(w, C, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(self.pool(a))
        c = self.d3(self.pool(b))
        y = self.u2(torch.cat([b, self.up2(c)], 1))
        return self.out(self.u1(torch.cat([a, self.up1(y)], 1)))


def dice_loss(logits, target, eps=1e-6):
    p = F.softmax(logits, dim=1)
    onehot = F.one_hot(target, C).permute(0, 3, 1, 2).float()
    inter = (p * onehot).sum(dim=(0, 2, 3))
    union = p.sum(dim=(0, 2, 3)) + onehot.sum(dim=(0, 2, 3))
    return 1 - ((2 * inter + eps) / (union + eps)).mean()


torch.manual_seed(0)
model = UNet().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
hist = torch.zeros(C, C, device="cuda")
for step in range(3):
    x, y = torch.randn(8, 3, 128, 128).cuda(), torch.randint(0, C, (8, 128, 128)).cuda()
    logits = model(x)
    loss = F.cross_entropy(logits, y, ignore_index=255) + dice_loss(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        pred = logits.argmax(1)
        hist += torch.bincount((C * y + pred).flatten(), minlength=C * C).reshape(C, C)
    print(step, f"{loss.item():.3f}")
iou = hist.diag() / (hist.sum(1) + hist.sum(0) - hist.diag()).clamp(min=1)
print("mIoU", iou.mean().item(), [f"{v:.2f}" for v in iou[:3].tolist()])
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
