"""Lightning: one plugin is lowp's.

python examples/lightning_fit.py
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lowp.integrations.lightning import LowpPrecision


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
x = torch.randn(1024, 20)
data = TensorDataset(x, x[:, :3].argmax(1))
trainer = lightning.Trainer(
    plugins=[LowpPrecision("flex16+5")],  # or "16-mixed", "bf16", "fp8" ...; in place of precision=
    accelerator="cpu", max_epochs=4, gradient_clip_val=1.0, logger=False, enable_progress_bar=False,
)  # fmt: skip
trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=256))
print(f"accuracy {trainer.callback_metrics['accuracy']:.3f} in {trainer.precision}")
