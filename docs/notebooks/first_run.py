# %% [markdown]
# # A first mixed-precision run
#
# A small network learns handwritten digits in fp32, bf16 and fp16. The notebook runs in a few seconds on a CPU.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import lowp
from lowp.recipes.data.digits import TRAINING, read_digits

images, labels = read_digits()
images = images / 16
x, y = images[:TRAINING], labels[:TRAINING]
unseen, wanted = images[TRAINING:], labels[TRAINING:]

# %% [markdown]
# The loop is the usual one. The five lines of lowp are marked.


# %%
def train(name, epochs=15):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    precision = lowp.Precision(name)  # 1
    model, optimizer = precision.prepare(model, optimizer)  # 2
    losses = []
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            with precision.autocast():  # 3
                loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            precision.backward(loss)  # 4
            precision.step(optimizer)  # 5
        losses.append(float(loss.detach()))
    with torch.no_grad(), precision.autocast():
        right = (model(unseen).argmax(1) == wanted).float().mean()
    return float(right), losses, precision


results = {name: train(name) for name in ("fp32", "bf16", "fp16")}
for name, (right, _, precision) in results.items():
    print(f"{name}: {right:.1%} right, {int(precision.skipped_steps)} skipped steps")

# %%
for name, (_, losses, _) in results.items():
    plt.semilogy(losses, label=name)
plt.xlabel("epoch")
plt.ylabel("training loss")
plt.legend()
plt.show()

# %% [markdown]
# All three end within a few digits of each other: rounding errors are smaller than the noise of a batch.

# %%
assert all(right > 0.95 for right, _, _ in results.values())
