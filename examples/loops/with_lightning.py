"""The same with Lightning: ``with_lightning.py first.example.org:7400 0``, and ``... 1``."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import thinwire

address, rank = sys.argv[1], int(sys.argv[2])
shared = thinwire.local_steps_lightning(peers=lambda: thinwire.meet(address, rank, replicas=2))


class Mirror(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def training_step(self, batch, number):
        return (self.net(batch) - batch.flip(1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


torch.manual_seed(0)
model = Mirror()
data = torch.randn(2048, 32, generator=torch.Generator().manual_seed(1))[rank::2]  # this site's share
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(max_epochs=3, callbacks=[shared], **quiet)
trainer.fit(model, DataLoader(data, 16, shuffle=True))

loss = trainer.callback_metrics.get("loss", model.training_step(data, 0)).item()
print(f"loss {loss:.4f}, weights {sum(p.double().sum().item() for p in model.parameters()):.12f}")
