"""A number format of one's own: what it can hold, what it does to a model, and a training in it.

python examples/own_format.py
"""

from pathlib import Path

import torch
from torch import nn

import lowp
from lowp import Policy, Rule

own = lowp.format("e4m6")  # 11 bits: 4 of exponent, 6 of mantissa
print(f"{own.name}: largest {own.maximum:g}, smallest normal {own.smallest_normal:g}")
x = torch.tensor([0.1, 1.0, 3.14159, 1000.0])
print("to nearest ", lowp.quantize(x, "e4m6").tolist())
print("stochastic ", lowp.quantize(x, "e4m6:stochastic", seed=1).tolist())

# operands of products in e4m6, gradients in e5m5 with stochastic rounding, the last layer in fp32
rules = (
    Rule.of("contraction", where="4", input="fp32", weight="fp32", grad="fp32"),
    Rule.of("contraction", input="e4m6", weight="e4m6", grad="e5m5:stochastic"),
)
policy = Policy(rules, name="mine")
Path("mine.toml").write_text(policy.to_toml())  # for lowp run --policy mine.toml train.py

torch.manual_seed(0)
x = torch.randn(1024, 20)
y = x[:, :3].argmax(1)
for name in ("fp32", policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    precision = lowp.Precision(name)
    model, optimizer = precision.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for batch in torch.randperm(len(x)).split(64) * 3:
        optimizer.zero_grad()
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(x[batch]).float(), y[batch])
        precision.backward(loss)
        precision.step(optimizer)
    with torch.no_grad(), precision.autocast():
        accuracy = (model(x).argmax(1) == y).float().mean()
    print(f"{precision.preset.name}: accuracy {accuracy:.3f}, loss scale {precision.scale:g}")
