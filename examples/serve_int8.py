"""A trained model served in int8: its size, its answers beside fp32's, and a file that loads in another process.

python examples/serve_int8.py
"""

import torch
from torch import nn

import lowp

torch.manual_seed(0)
x = torch.randn(1024, 64)
y = x[:, :10].argmax(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()

model.eval()
served = lowp.quantize_model(model, "int8", [x[:256]])  # the data find the ranges of activations
lowp.save("served.pt", model=served)

with torch.no_grad():
    agree = (served(x).argmax(1) == model(x).argmax(1)).float().mean()
sizes = [sum(one.nbytes for one in each.state_dict().values() if torch.is_tensor(one)) for each in (model, served)]
print(f"{sizes[1] / sizes[0]:.2f} of fp32's size, {agree:.3f} of the answers are fp32's")
