# %% [markdown]
# # A format of your own
#
# `eXmY` has X exponent bits and Y mantissa bits. Here 6 bits, `e3m2`, and other widths: which numbers they have, how
# they round, and how a network trains in them.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import lowp

format = lowp.format("e3m2")
print(format, "largest", format.maximum, "smallest", format.smallest)

# %% [markdown]
# All its positive numbers:

# %%
x = torch.linspace(0, 30, 100_001)
print(lowp.quantize(x, "e3m2:saturate").unique().tolist())

# %% [markdown]
# The error of rounding grows with the number, by steps at powers of two:

# %%
line = torch.linspace(0.05, 8, 2000)
for name in ("e3m2", "e3m4", "e4m3fn"):
    plt.plot(line, (lowp.quantize(line, name) - line).abs(), label=name)
plt.xlabel("number")
plt.ylabel("error of rounding")
plt.legend()
plt.show()

# %% [markdown]
# A precision takes the same names. Operands and gradients of products are in the format, the rest in fp32.


# %%
def final_loss(name):
    torch.manual_seed(0)
    x = torch.randn(512, 20)
    y = x[:, :4].argmax(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    precision = lowp.Precision(name)
    model, optimizer = precision.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    for _ in range(100):
        optimizer.zero_grad()
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        precision.backward(loss)
        precision.step(optimizer)
    return float(loss.detach())


losses = {name: final_loss(name) for name in ("fp32", "e5m7", "e5m2", "e4m1", "mxfp4")}
for name, loss in losses.items():
    print(f"{name:6} {loss:.3f}")

# %%
assert losses["e5m7"] < 1.5 * losses["fp32"] + 0.05
