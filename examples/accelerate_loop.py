"""Accelerate: one class is lowp's, the loop is Accelerate's own.

python examples/accelerate_loop.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lowp.integrations.accelerate import LowpAccelerator

torch.manual_seed(0)
x = torch.randn(1024, 20)
data = TensorDataset(x, x[:, :3].argmax(1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)
loader = DataLoader(data, batch_size=32, shuffle=True)

accelerator = LowpAccelerator("fp16", gradient_accumulation_steps=2)  # not Accelerator(mixed_precision="fp16", ...)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
for _ in range(6):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
accelerator.save_state("accelerate-out")  # with the loss scale; load_state resumes with the same bits

accuracy = (model(x).argmax(1) == data.tensors[1]).float().mean()
print(f"accuracy {accuracy:.3f}, loss scale {accelerator.lowp.scale:g}")
