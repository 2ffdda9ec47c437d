"""Two optimizers, a discriminator that is called on real and on false data, a gradient penalty."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizers = [torch.optim.Adam(one.parameters(), lr=1e-3) for one in (generator, critic)]
norms = []
for _ in range(12):
    real = torch.randn(32, 2) + 2
    false = generator(torch.randn(32, 4))
    mixed = (0.5 * real + 0.5 * false.detach()).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    norms.append(slope.norm().item())
    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    loss = critic(false.detach()).mean() - critic(real).mean() + 10 * penalty
    critic.zero_grad()
    loss.backward()
    optimizers[1].step()
    generator_loss = -critic(false).mean()
    generator.zero_grad()
    generator_loss.backward()
    optimizers[0].step()
print(f"loss {loss.item():.6f} generator {generator_loss.item():.6f} slope {norms[0]:.6f}")
