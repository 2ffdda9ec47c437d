"""Convolutions with BatchNorm, gradient accumulation, clipping and OneCycle; prints what it sees of gradients."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 1, 8, 8)
y = (x.mean((1, 2, 3)) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8, num_workers=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1), nn.Flatten(), nn.Linear(72, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4 * 8 // 2)
for _ in range(4):
    for index, (data, target) in enumerate(loader):
        output = model(data)
        assert output.dtype is torch.float32
        loss = F.cross_entropy(output, target) / 2
        loss.backward()
        if index % 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
torch.save(model.state_dict(), "cnn.pt")
print(f"loss {loss.item():.9f} norm {float(norm):.9f}")
