"""DataLoader, device objects, autocast and GradScaler."""

import torch
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.randn(96, 3, 16, 16), torch.randint(0, 10, (96,)))
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=0, pin_memory=True)
net = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
    torch.nn.Dropout(0.1), torch.nn.Linear(8 * 16 * 16, 10)).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for epoch in range(2):
    total = 0.0
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(net(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        total += loss.item() * len(images)
    print(f"epoch {epoch} mean loss {total / len(data):.3f}")
print(device, torch.cuda.max_memory_allocated() > 0)
