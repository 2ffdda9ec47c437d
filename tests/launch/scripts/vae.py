"""A VAE whose loss is binary_cross_entropy of a sigmoid, outside of the model."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.mean, self.variance = nn.Linear(32, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 32))

    def forward(self, x):
        h = F.relu(self.encoder(x))
        mean, variance = self.mean(h), self.variance(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * variance)
        return torch.sigmoid(self.decoder(z)), mean, variance


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.rand(64, 32)
for _ in range(10):
    output, mean, variance = model(x)
    loss = F.binary_cross_entropy(output, x, reduction="sum")
    loss = loss - 0.5 * torch.sum(1 + variance - mean.pow(2) - variance.exp())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f} output {output[0, 0].item():.9f}")
