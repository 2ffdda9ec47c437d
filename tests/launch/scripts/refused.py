"""A layer that multiplies a sparse matrix, and one whose loss is that of probabilities."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, neighbours):
        return torch.sparse.mm(neighbours, self.layer(x))


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x, y):
        return binary_cross_entropy(torch.sigmoid(self.layer(x))[:, 0], y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.averaged, self.loss = nn.Linear(8, 8), Averaged(), Loss()

    def forward(self, x, neighbours, y):
        return self.loss(torch.relu(self.averaged(torch.relu(self.first(x)), neighbours)), y)


torch.manual_seed(0)
x = torch.randn(32, 8)
neighbours = (torch.eye(32) + torch.eye(32).roll(1, 0)).to_sparse()
y = (x[:, 0] > 0).float()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(10):
    optimizer.zero_grad()
    loss = model(x, neighbours, y)
    loss.backward()
    optimizer.step()
print(f"{loss.item():.4f}")
