"""Two images through one network, a sigmoid within the model, nn.BCELoss."""

import torch
from torch import nn

torch.manual_seed(0)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8))
        self.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
        self.sigmoid = nn.Sigmoid()

    def forward(self, first, second):
        return self.sigmoid(self.head(torch.cat((self.trunk(first), self.trunk(second)), 1)))


model, criterion = Siamese(), nn.BCELoss()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
first, second, target = torch.randn(32, 1, 8, 8), torch.randn(32, 1, 8, 8), (torch.rand(32) > 0.5).float()
for _ in range(10):
    optimizer.zero_grad()
    loss = criterion(model(first, second).squeeze(), target)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.6f}")
