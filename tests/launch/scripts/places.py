"""Gradients that torch.autograd is asked for in each of the ways that it takes: iterables, edges of the graph."""

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
parameters = list(model.parameters())
optimizer = torch.optim.SGD(parameters, lr=0.1)
x, y = torch.randn(32, 8), torch.arange(32) % 4


def show(gradients):
    print(*(f"{gradient.norm().item():.7f}" for gradient in gradients))


def accumulated(*arguments):
    optimizer.zero_grad()
    torch.autograd.backward(*arguments, retain_graph=True)
    show(one.grad for one in parameters)


for _ in range(2):
    loss = nn.functional.cross_entropy(model(x), y)
    accumulated(loss)
    accumulated(one for one in (loss,))
    accumulated(get_gradient_edge(loss), torch.ones(()))
    show(torch.autograd.grad(loss, parameters, retain_graph=True))
    show(torch.autograd.grad((one for one in (loss,)), model.parameters(), retain_graph=True))
    show(torch.autograd.grad(loss, [get_gradient_edge(one) for one in parameters], retain_graph=True))
    optimizer.step()
