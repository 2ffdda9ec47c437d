# %% [markdown]
# # Why fp16 needs a loss scale
#
# The smallest number of fp16 is 2^-24. This notebook makes gradients smaller and smaller, and watches when fp16 loses
# them.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import lowp

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
x, y = torch.rand(256, 64), torch.randint(10, (256,))


def gradients(precision, factor):
    """Return the weight gradients of a loss that is multiplied by a factor, and divided by it afterwards in fp32."""
    model.zero_grad()
    with lowp.autocast(precision):
        loss = nn.functional.cross_entropy(model(x), y)
    (loss * factor).backward()
    return torch.cat([p.grad.flatten().double() / factor for p in model.parameters()])


exact = gradients("fp32", 1.0)

# %% [markdown]
# A loss that is a mean over many elements is small, and so are its gradients. `2^-k` stands for such a loss.

# %%
powers = list(range(0, 28, 3))
lost = []
for power in powers:
    found = gradients("fp16", 2.0**-power)
    lost.append(float((found[exact != 0] == 0).double().mean()))
    print(f"loss x 2^-{power:<2}: {lost[-1]:6.1%} of the gradients are zero in fp16")

# %% [markdown]
# A loss scale moves them back into the range. Multiplying the loss by 2^k undoes the division, and fp16 has the
# gradients again.

# %%
histogram = lowp.statistics(exact.float()).exponent_histogram[1:255].tolist()
exponents = range(-126, 128)
for shift, label in ((0, "loss as it is"), (-15, "loss x 2^-15")):
    plt.stairs(histogram, [e + shift for e in [*exponents, 128]], fill=True, alpha=0.4, label=label)
plt.axvline(-24, color="black", label="smallest number of fp16")
plt.xlim(-45, 0)
plt.xlabel("gradient, log2")
plt.legend()
plt.show()

# %%
assert lost[0] < 0.02 and lost[-1] > 0.9 and lost == sorted(lost)

# %% [markdown]
# `lowp.Precision("fp16")` searches the scale in the first step, and halves it when a gradient overflows.

# %%
precision = lowp.Precision("fp16")
model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
with precision.autocast():
    loss = nn.functional.cross_entropy(model(x), y)
precision.backward(loss)
precision.step(optimizer)
print("scale", float(precision.scale), "skipped steps", int(precision.skipped_steps))
