# %% [markdown]
# # Training in int16
#
# Flexpoint stores every tensor as int16 under one power of two, its exponent, which is predicted from earlier steps.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import lowp

torch.manual_seed(0)
x = torch.randn(256, 20)
y = x[:, :4].argmax(1)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
precision = lowp.Precision("flex16+5")
model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

maxima, units = [], []
for _ in range(80):
    optimizer.zero_grad()
    with precision.autocast():
        loss = nn.functional.cross_entropy(model(x), y)
    precision.backward(loss)
    precision.step(optimizer)
    weight = model[0].weight.detach()
    maxima.append(float(weight.abs().max()))
    units.append(2.0 ** precision.exponents.exponent("weight of 0.weight"))
print(f"loss {float(loss.detach()):.3f}")

# %% [markdown]
# The weights are int16 mantissas times a power of two. The window of the mantissas follows the largest weight:

# %%
plt.semilogy(maxima, label="largest weight")
plt.semilogy([32767 * unit for unit in units], drawstyle="steps", label="largest number of the window")
plt.semilogy(units, drawstyle="steps", label="unit")
plt.xlabel("step")
plt.legend()
plt.show()

# %%
mantissas = lowp.encode(model[0].weight.detach(), "flex16+5").payload
print(mantissas.dtype, mantissas.flatten()[:8].tolist())

# %% [markdown]
# How well the exponents were predicted: tensors that were cut off (saturated), and bits that stayed free.

# %%
for name, one in precision.exponents.summary().items():
    print(f"{name}: {one.writes} writes, {one.saturated} saturated, {one.headroom_bits:.1f} bits free")
assert loss < 0.2
