"""An optimizer for each parameter, made after the first backward pass as Pyro does; all step after one pass."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
x, y = torch.randn(64, 8), torch.randn(64, 4)
optimizers = []
for _ in range(12):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizers = optimizers or [torch.optim.Adam([parameter], lr=1e-2) for parameter in model.parameters()]
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
print(f"loss {loss.item():.6f}")
