"""Gradients of four small batches, added up and clipped before one step, with two optimizers that share a loss scale.

python examples/accumulate_and_clip.py
"""

import torch
from torch import nn

import lowp

torch.manual_seed(0)
x = torch.randint(0, 50, (512, 8))
y = x.sum(1) % 2  # is the sum even?
embedding, network = nn.Embedding(50, 16), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 2))
model = nn.ModuleList([embedding, network])
slow = torch.optim.SGD(embedding.parameters(), lr=0.5)
fast = torch.optim.AdamW(network.parameters(), lr=1e-2)

precision = lowp.Precision("fp16")
model, slow = precision.prepare(model, slow)
fast = precision.prepare_optimizer(fast)

TOGETHER = 4
for _ in range(25):
    for number, batch in enumerate(torch.randperm(len(x)).split(16), 1):
        with precision.autocast():
            loss = nn.functional.cross_entropy(network(embedding(x[batch]).sum(1)), y[batch])
        precision.backward(loss / TOGETHER)
        if number % TOGETHER == 0:
            for optimizer in (slow, fast):
                precision.unscale_(optimizer)  # before clipping: gradients are multiplied by the loss scale
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            precision.step(slow, fast)
            slow.zero_grad()
            fast.zero_grad()

with torch.no_grad(), precision.autocast():
    accuracy = (network(embedding(x).sum(1)).argmax(1) == y).float().mean()
print(f"accuracy {accuracy:.3f}, norm of the last gradient {norm:.3f}, loss scale {precision.scale:g}")
