"""A model that exchanges its parameters with others, as it does where torch.__future__ asks for that."""

import torch
from torch import nn

torch.__future__.set_swap_module_params_on_conversion(True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(32, 8), torch.arange(32) % 4


def train(steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"{loss.item():.7f}", *(f"{one.grad.norm().item():.7f}" for one in model.parameters()))


train()
first = {name: value.clone() for name, value in model.state_dict().items()}
train()
model.load_state_dict(first)
print(all(torch.equal(value, first[name]) for name, value in model.state_dict().items()))
train()
model.double().float()
train()

# contents go with their gradients and hooks; the optimizer holds the same objects as before
other = nn.Parameter(torch.randn(16, 8) * 0.1)
other.register_hook(lambda gradient: print(f"hook {gradient.norm().item():.7f}"))
torch.utils.swap_tensors(model[0].weight, other)
print(other.grad is not None)
train()
twins = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))]
optimizer.add_param_group({"params": twins})
torch.utils.swap_tensors(*twins)
scores = model(x)
for one, factor in zip(twins, (1.0, 3.0), strict=True):
    optimizer.zero_grad()
    (factor * one * scores.detach()).sum().backward()
    print(f"{one.grad.norm().item():.7f}", one.detach().sum().item(), [twin.grad is None for twin in twins])
    optimizer.step()
print(*(f"{twin.detach().norm().item():.7f}" for twin in twins))
