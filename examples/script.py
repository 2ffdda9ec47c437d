"""A script that knows nothing of lowp. It trains in a precision all the same, and prints its last line beside fp32's:

lowp run --precision bf16 examples/script.py
lowp run --compare fp32,fp16,flex16+5 examples/script.py
"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 1, 12, 12)
x[:256, :, :6] += 0.5
y = (torch.arange(512) < 256).long()
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(6):
    for batch in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
print(f"accuracy {(model(x).argmax(1) == y).float().mean():.3f}")
