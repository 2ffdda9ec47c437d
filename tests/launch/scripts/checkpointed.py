"""Layers that are computed again in the backward pass, called by the script itself and within a module."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Mixed(nn.Module):
    """Its code mixes dtypes where its layer gives 16 bits, and has a function of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        y = torch.zeros(len(x), 32)
        y[:, ::2] = self.layer(x)[:, ::2]
        y.index_add_(0, torch.arange(len(x)), self.layer(x))
        return Square.apply(y)


class Block(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.mixed, self.layer, self.reentrant = Mixed(), nn.Linear(32, 4), reentrant

    def forward(self, x):
        return self.layer(checkpoint(self.mixed, x, use_reentrant=self.reentrant))


torch.manual_seed(0)
x = torch.randn(64, 16)
y = x[:, :4].argmax(1)
losses = []
for reentrant in (False, True):
    layers = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 32), nn.Tanh())
    model = nn.ModuleList([layers, Block(reentrant)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        hidden = checkpoint_sequential(layers, 2, x.clone().requires_grad_(), use_reentrant=reentrant)
        loss = nn.functional.cross_entropy(model[1](hidden), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(" ".join(f"{loss:.4f}" for loss in losses))
