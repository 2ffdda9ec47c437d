"""A policy gradient: single states, sampled actions, a list of losses."""

import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 2), nn.Softmax(-1))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for _ in range(5):
    saved, rewards, state = [], [], torch.randn(4)
    for _ in range(8):
        chosen = Categorical(policy(state.unsqueeze(0)))
        action = chosen.sample()
        saved.append(chosen.log_prob(action))
        rewards.append(float(action) * state[0].item())
        state = torch.randn(4)
    loss = torch.cat([-one * reward for one, reward in zip(saved, rewards, strict=True)]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.6f}")
