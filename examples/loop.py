"""A training loop in 16 bits: five lines of it are lowp's.

python examples/loop.py
"""

import torch
from torch import nn

import lowp

torch.manual_seed(0)
x = torch.randn(1024, 20)
y = x[:, :3].argmax(1)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)

precision = lowp.Precision("fp16")  # or bf16, fp8, flex16+5, e5m7, a policy file ...
model, optimizer = precision.prepare(model, optimizer)

for _ in range(5):
    model.train()
    for batch in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        precision.backward(loss)
        precision.step(optimizer)
        if precision.stepped:  # not after a step that overflowed and was skipped
            scheduler.step()

model.eval()
with torch.no_grad(), precision.autocast():
    accuracy = (model(x).argmax(1) == y).float().mean()
print(f"accuracy {accuracy:.3f}, loss scale {precision.scale:g}, {precision.skipped_steps} steps skipped")
