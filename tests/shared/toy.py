"""A toy language model cut into stages, trained by real processes over real links."""

import json
import multiprocessing
import os
import tempfile
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from thinwire.channels.channel import Scheme
from thinwire.channels.memory import Delta
from thinwire.codecs import Uniform
from thinwire.links import connect_mesh
from thinwire.uses.training.pipeline.compressed_stage import CompressedStage, ScheduleEager1F1B

VOCAB, DIM, SEQ, SAMPLES, MICROBATCHES, ROWS = 64, 32, 16, 16, 4, 2
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "eager1f1b": ScheduleEager1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
}


class Pair:
    """A recipe: one scheme for each direction."""

    def __init__(self, forward, backward=None):
        self.schemes = {"forward": forward, "backward": backward or forward}


RECIPES = {
    "raw": Pair(Scheme()),
    "direct8": Pair(Scheme(Uniform(bits=8))),
    "delta": Pair(
        Scheme(Uniform(bits=4), Delta(), Uniform(bits=8), Uniform(bits=8)), Scheme(Uniform(bits=8))
    ),
    "step": Pair(Scheme(Uniform(bits=8), Delta("step"))),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x + mixed))))


def parts(n):
    """Cut the same model into ``n`` stages."""
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCAB, DIM), *[Block() for _ in range(4)], nn.Linear(DIM, VOCAB)]
    size = 4 // n
    cuts = [layers[1 + i * size : 1 + (i + 1) * size] for i in range(n)]
    cuts[0].insert(0, layers[0])
    cuts[-1].append(layers[-1])
    return [nn.Sequential(*c) for c in cuts]


def loss_fn(y, t):
    return nn.functional.cross_entropy(y.reshape(-1, VOCAB), t.reshape(-1))


def data():
    g = torch.Generator().manual_seed(1)
    x = torch.randint(0, 9, (SAMPLES, SEQ + 1), generator=g).cumsum(1) % VOCAB
    return x[:, :-1], x[:, 1:]


def batches(steps):
    g = torch.Generator().manual_seed(2)
    for _ in range(steps):
        yield torch.randperm(SAMPLES, generator=g)[: MICROBATCHES * ROWS]


class Toy:
    """One rank of a toy run."""

    def __init__(self, rank, world, schedule, peers=None, recipe=None, **options):
        n = 4 if schedule == "interleaved1f1b" else world
        mine = range(rank, n, world)
        cls, kw = (
            (PipelineStage, {}) if recipe is None else (CompressedStage, {"peers": peers, "recipe": recipe})
        )
        cpu = torch.device("cpu")
        self.stages = [cls(parts(n)[i], i, n, cpu, **kw, **options) for i in mine]
        given = self.stages if schedule == "interleaved1f1b" else self.stages[0]
        self.schedule = SCHEDULES[schedule](given, MICROBATCHES, loss_fn=loss_fn)
        self.parameters = [p for s in self.stages for p in s.submod.parameters()]
        self.optimiser = torch.optim.AdamW(self.parameters, 1e-3)
        self.rank, self.last = rank, rank == world - 1
        self.data = data()

    def step(self, ids, train=True):
        """Run one batch; return the loss on the last rank."""
        x, y = (t[ids] for t in self.data)
        losses, run = [], self.schedule.step if train else self.schedule.eval
        if self.rank == 0 and train and isinstance(self.stages[0], CompressedStage):
            self.stages[0].begin(ids, MICROBATCHES)
        if self.rank == 0:
            run(x)
        else:
            run(target=y, losses=losses) if self.last else run()
        if train:
            self.optimiser.step()
            self.optimiser.zero_grad()
        return sum(v.item() for v in losses) / len(losses) if losses else None

    def train(self, steps):
        return [self.step(ids) for ids in batches(steps)]


@contextmanager
def joined(rank, world, port, shape=None):
    """Join the process group and the mesh of one test."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)
    peers = connect_mesh(rank, world, dist.PrefixStore("links", store), shape=shape)
    yield peers
    dist.barrier()
    for p in peers.values():
        p.close()
    dist.destroy_process_group()


def _entry(rank, function, world, port, out, args):
    result = function(rank, world, port, *args)
    Path(out, f"{rank}.json").write_text(json.dumps(result))
    os._exit(0)


def in_processes(world, function, *args):
    """Run ``function(rank, world, port, *args)`` in ``world`` processes; return what each returned (JSON)."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as out:
        # Forks of one process that has torch already: to import it anew takes each of them seconds.
        multiprocessing.set_forkserver_preload(
            ["torch.distributed.pipelining", "thinwire.uses.training.pipeline.compressed_stage"]
        )
        entered = function, world, store.port, out, args
        mp.start_processes(_entry, entered, world, start_method="forkserver")
        return [json.loads(Path(out, f"{r}.json").read_text()) for r in range(world)]
