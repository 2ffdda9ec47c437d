"""A compiled model and a compiled function."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
fast = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(32, 8)
for _ in range(6):
    optimizer.zero_grad()
    loss = (fast(x) - x[:, :1]).square().mean()
    loss.backward()
    optimizer.step()


@torch.compile(backend="aot_eager")
def computed(x):
    return nn.functional.mse_loss(model(x), x[:, :1])


loss = computed(x)
optimizer.zero_grad()
loss.backward()
optimizer.step()
assert loss.dtype is torch.float32
print(f"loss {loss.item():.6f}")
