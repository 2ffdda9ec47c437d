"""A model and its optimizer, copied and pickled in the middle of the training: the copies train as the original."""

import copy
import pickle

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(32, 16)
y = x[:, :4].argmax(1)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


train(model, optimizer, 3)
copied = copy.deepcopy((model, optimizer))
pickled = pickle.loads(pickle.dumps((model, optimizer)))
wanted = train(model, optimizer, 4)
assert train(*copied, 4) == train(*pickled, 4) == wanted
print(" ".join(f"{loss:.4f}" for loss in wanted))
