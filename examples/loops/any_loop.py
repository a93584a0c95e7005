"""Two sites train one model: ``any_loop.py first.example.org:7400 0`` at one, ``... 1`` at the other."""

import sys

import torch
from torch import nn

import thinwire

address, rank = sys.argv[1], int(sys.argv[2])
peers = thinwire.meet(address, rank, replicas=2)  # off loopback: token=thinwire.read_token()

torch.manual_seed(0)  # the same weights everywhere
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = torch.randn(2048, 32, generator=torch.Generator().manual_seed(1))[rank::2]  # this site's share

with thinwire.local_steps(model, optimizer, peers=peers) as training:  # or recipe="sparseloco"
    for _ in range(200):
        batch = data[torch.randint(len(data), (16,))]
        optimizer.zero_grad()
        loss = (model(batch) - batch.flip(1)).square().mean()
        loss.backward()
        optimizer.step()  # and every few steps, beside the next ones, an exchange
    training.drain()  # the same bits at both sites

print(f"loss {loss.item():.4f}, weights {sum(p.double().sum().item() for p in model.parameters()):.12f}")
