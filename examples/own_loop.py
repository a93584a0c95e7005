import torch
from torch import distributed, nn
from torch.distributed.pipelining import ScheduleGPipe

from thinwire import CompressedStage, connect_mesh, parse_recipe

store, rank, world = next(distributed.rendezvous("env://"))  # torchrun --nproc-per-node 2 own_loop.py
distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
peers = connect_mesh(rank, world, store)  # off loopback: host="192.0.2.1", token=thinwire.read_token()

half = [nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 256)][rank]
stage = CompressedStage(half, rank, world, torch.device("cpu"), peers=peers, recipe=parse_recipe("thinwire"))
schedule = ScheduleGPipe(stage, 4, loss_fn=lambda y, t: nn.functional.cross_entropy(y.mT, t))
optimiser = torch.optim.AdamW(half.parameters(), lr=1e-2)
text = torch.arange(32 * 33).reshape(32, 33) % 251  # your samples, each of 33 tokens

for ids in torch.arange(32).repeat(3).split(8):  # three passes over the samples, 8 a step
    stage.begin(ids, 4)  # references are kept by sample: an id must name the same sample each time
    schedule.step(*[text[ids, :-1]] * (rank == 0), target=text[ids, 1:], losses=(losses := []))
    optimiser.step()
    optimiser.zero_grad()
    print(f"rank {rank}: losses {[round(v.item(), 3) for v in losses]}")

for peer in peers.values():
    peer.close()
