"""Two models that two threads train at once, in many short passes."""

import threading

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(32, 16)
y = x[:, :4].argmax(1)
models = [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(2)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
last = [0.0, 0.0]
together = threading.Barrier(2)


def train(number):
    together.wait()
    for _ in range(100):
        optimizers[number].zero_grad()
        loss = nn.functional.cross_entropy(models[number](x), y)
        loss.backward()
        optimizers[number].step()
        last[number] = loss.item()


threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
for one in threads:
    one.start()
for one in threads:
    one.join()
print(" ".join(f"{loss:.4f}" for loss in last))
