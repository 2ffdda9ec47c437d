"""Gradients that a script asks for beside its training, at sites whose gradients are smaller in training."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(256, 4)
y = x[:, :3].argmax(1)
for step in range(20):
    trained = x.clone().requires_grad_()
    loss = nn.functional.cross_entropy(model(trained), y)
    if step % 5 == 4:  # before the pass that gives the sites of this step an exponent
        (penalty,) = torch.autograd.grad(1e3 * loss, trained, create_graph=True)
        print(f"penalty {penalty.norm().item():.5f}")
        print(f"jacobian {torch.autograd.functional.jacobian(model, x[0]).norm().item():.5f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.5f}")
