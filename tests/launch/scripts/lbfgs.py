"""A closure optimizer that computes its loss, which recomputes a part, as often as it likes, or once if asked to."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
x = torch.randn(32, 4)
y = x.sum(1, keepdim=True)
optimizer = (torch.optim.SGD if len(sys.argv) > 1 else torch.optim.LBFGS)(model.parameters(), lr=0.5)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model[2](checkpoint(model[:2], x, use_reentrant=False)), y)
    loss.backward()
    return loss


for _ in range(3):
    loss = optimizer.step(closure)
print(f"loss {float(loss.detach()):.9f}")
