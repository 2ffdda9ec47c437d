"""A regression on a plain tensor, without a module but its loss; a model is called only if an argument asks for it."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
weight = torch.zeros(8, 1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
x, criterion = torch.randn(64, 8), nn.MSELoss()
y = x.sum(1, keepdim=True)
for step in range(10):
    optimizer.zero_grad()
    loss = criterion(x @ weight, y)
    loss.backward()
    optimizer.step()
    if step == 5 and len(sys.argv) > 1:
        nn.Linear(8, 1)(x), nn.Linear(8, 1)(x)
print(f"loss {loss.item():.6f}")
