"""Models that are converted between dtypes after they have been called, and undefined gradients in their hooks."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(32, 8), torch.arange(32) % 4


def train():
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


train()
model.double()
inputs = x[:2].double().requires_grad_()
handle = model[0].weight.register_hook(lambda gradient: None)
inputs.register_hook(lambda gradient: None)
model[1].register_full_backward_hook(lambda module, given, taken: None)
print(torch.autograd.gradcheck(model, inputs), model(inputs).dtype)
model.float()
train()
model.half()
x = x.half()
train()
model.float()
x = x.float()

other = nn.Linear(8, 4).half()
stepped = torch.optim.SGD(other.parameters(), lr=0.1)
print(other(x.half()).dtype)
other.float()
with torch.no_grad():
    weight = torch.randn(4, 8)
    other.weight.copy_(weight)
    other.bias.zero_()
    exact = x.double() @ weight.double().T
    found = other(x).double()
print(found.shape)
print("rounded:", (found - exact).abs().max().item() > 1e-5)
