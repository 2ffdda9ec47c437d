"""Gradients near 1, by torch.autograd.grad and by torch.func: every number is exact in every format."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

model = nn.Linear(4, 2, bias=False)
with torch.no_grad():
    model.weight.copy_(torch.tensor([[1.0, -1.0, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0]]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
x = torch.tensor([[1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0]])


def loss_of(parameters, x):
    return functional_call(model, parameters, (x[None],)).sum()


for _ in range(2):  # before the first step, and after it
    (found,) = torch.autograd.grad(model(x).sum(), model.weight)
    each = vmap(grad(loss_of), in_dims=(None, 0))({"weight": model.weight.detach()}, x)["weight"]
    print(found.tolist(), each.tolist())
    model(x).sum().backward()
    optimizer.step()
