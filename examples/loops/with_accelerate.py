"""The same with accelerate: ``with_accelerate.py first.example.org:7400 0``, and ``... 1``."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import thinwire

address, rank = sys.argv[1], int(sys.argv[2])
peers = thinwire.meet(address, rank, replicas=2)  # at a site of several processes, in the main one

torch.manual_seed(0)
accelerator = Accelerator()
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
data = torch.randn(2048, 32, generator=torch.Generator().manual_seed(1))[rank::2]  # this site's share
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, 16, shuffle=True))

with thinwire.local_steps(model, optimizer, peers=peers) as training:  # behind prepare
    for _ in range(3):
        for batch in batches:
            optimizer.zero_grad()
            loss = (model(batch) - batch.flip(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
    training.drain()

print(f"loss {loss.item():.4f}, weights {sum(p.double().sum().item() for p in model.parameters()):.12f}")
