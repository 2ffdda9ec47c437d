"""A transformer whose blocks are checkpointed, both ways; hooks on hidden tensors, a retained gradient."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        x = checkpoint(self.blocks[1], x, use_reentrant=True)
        return self.head(x)


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(16, (4, 9))
seen = []
for _ in range(6):
    logits = model(tokens[:, :-1])
    logits.retain_grad()
    logits.register_hook(lambda gradient: seen.append(gradient.abs().max().item()))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    assert abs(logits.grad.abs().max().item() - seen[-1]) < 1e-6, (logits.grad.abs().max(), seen[-1])
    optimizer.step()
print(f"loss {loss.item():.6f} gradient {seen[0]:.6f}")
