"""One training with the optimizer of torch, fastai or Keras, which computes the same."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "packages"))
kind = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
if kind == "torch":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero, step = optimizer.zero_grad, optimizer.step
elif kind == "fastai":
    from fastai.optimizer import Optimizer

    optimizer = Optimizer(model.parameters(), lr=0.1)
    zero, step = optimizer.zero_grad, optimizer.step
else:
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    optimizer = BaseOptimizer(learning_rate=0.1)
    variables = [SimpleNamespace(value=parameter) for parameter in model.parameters()]
    optimizer.build(variables)
    nn.Linear(4, 2, device="meta")(torch.ones(2, 4, device="meta"))  # Keras asks for shapes
    zero, step = model.zero_grad, lambda: optimizer.apply([one.value.grad for one in variables], variables)
x = torch.randn(64, 4)
for _ in range(6):
    loss = nn.functional.mse_loss(model(x), x[:, :1])
    zero()
    loss.backward()
    step()
print(f"loss {loss.item():.8f} weights {sum(one.double().abs().sum().item() for one in model.parameters()):.8f}")
