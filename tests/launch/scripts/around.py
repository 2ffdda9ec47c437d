"""Modules around a model that have no parameters (a loss, a metric), and a model that is recorded for serving."""

import io
import warnings

import torch
from torch import nn

torch.manual_seed(0)


def contrast(first, second):
    return nn.functional.cross_entropy(first @ second.t(), torch.arange(len(first)))


class Contrast(nn.Module):
    def forward(self, first, second):
        return contrast(first, second)


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.count = 0

    def forward(self, value):
        self.total += value
        self.count += 1
        return self.total / self.count


class Late(nn.Module):
    """Makes its layer in its first call."""

    def __init__(self):
        super().__init__()
        self.layer = None

    def forward(self, x):
        if self.layer is None:
            self.layer = nn.Linear(x.shape[1], 8)
        return self.layer(x)


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


first, second, criterion, mean, late = network(), network(), Contrast(), Mean(), Late()
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
x, y, large = torch.randn(32, 8), torch.randn(32, 8), torch.tensor(1234567.0)
for _ in range(5):
    a, b = first(x), second(y)
    loss = criterion(a, b)
    assert torch.equal(loss, contrast(a, b))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert mean(large) == large
late(x)
weight, bias = late.layer.weight, late.layer.bias
print(f"late {(late(x) - nn.functional.linear(x, weight, bias)).abs().max().item():.9f}")

with warnings.catch_warnings():
    warnings.filterwarnings("error", category=torch.jit.TracerWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    traced = torch.jit.trace(first.eval(), x)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
hidden = nn.functional.linear(x, first[0].weight, first[0].bias).relu()
assert torch.equal(loaded.forward(x), nn.functional.linear(hidden, first[2].weight, first[2].bias))
print(f"loss {loss.item():.6f}")
