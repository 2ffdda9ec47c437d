"""Gradients of each example by torch.func, between steps whose gradients others have, too."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(0)
x = torch.randn(32, 16)
y = x[:, :4].argmax(1)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
other = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
later = torch.optim.SGD(other.parameters(), lr=0.1)
(nn.functional.cross_entropy(model(x), y) + nn.functional.cross_entropy(other(x), y)).backward()
optimizer.step()  # the step goes on: `later` may still step
parameters = {name: value.detach() for name, value in model.named_parameters()}


def loss_of(parameters, x, y):
    return nn.functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])


each = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
optimizer.zero_grad()
nn.functional.cross_entropy(model(x), y).backward()
for name, parameter in model.named_parameters():
    assert torch.allclose(each[name].mean(0), parameter.grad, rtol=0.1, atol=1e-2), name
print(f"{each['0.weight'].mean(0).norm():.4f} {model[0].weight.grad.norm():.4f}")
