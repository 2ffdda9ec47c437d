"""A training with a fault, named by its argument: what a monitor is to find in an unmodified script."""

import sys

import torch
from torch import nn

fault = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))
if fault == "bf16":
    model.bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(64, 16), torch.randint(4, (64,))
called = torch.compile(model, backend="aot_eager") if fault == "compiled" else model
for _ in range(10):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16, enabled=fault == "autocast"):
        logits = called(x.to(model[0].weight.dtype))
    factor = 1e-3 if fault == "autocast" else 1.0
    (factor * nn.functional.cross_entropy(logits.float(), y)).backward()
    if fault == "compiled":
        model[1].bias.grad.fill_(float("nan"))
    optimizer.step()
print(f"loss {float(logits.float().sum()):.6f}")
