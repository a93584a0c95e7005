"""Build what one rank needs: process group, links, its stages, the schedule."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from thinwire.engines.pipeline import CompressedStage
from thinwire.lab.job import Job
from thinwire.lab.loss import next_token_loss
from thinwire.lab.machine import cores, pick_dtype
from thinwire.lab.split import Stage, build_stage
from thinwire.links.mesh import Peer, connect_mesh
from thinwire.links.security import read_token
from thinwire.types import InputError, LinkError, require


@dataclass
class World:
    """This rank's place, and its connected peers by rank."""

    rank: int
    size: int
    peers: dict[int, Peer]

    def close(self) -> None:
        """Close all links, then leave the process group."""
        for peer in self.peers.values():
            peer.close()
        dist.destroy_process_group()


def join(job: Job) -> World:
    """Join the process group that the environment describes, and connect to every other rank."""
    config = job.config
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    require(
        size == config.ranks,
        InputError,
        f"{config.stages} stages with schedule {config.schedule} need {config.ranks} processes, "
        f"torchrun started {size}; change --stages or torchrun's --nnodes and --nproc-per-node",
    )
    timeout = timedelta(seconds=max(config.deadline, 60.0))
    try:
        # The schedules ask gloo for a few 4-byte votes at the start of training and of each evaluation.
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as e:
        master = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LinkError(f"rank {rank} could not meet the other ranks at {master}: {str(e)[:200]}") from e
    store = dist.PrefixStore("thinwire", store)
    peers = connect_mesh(
        rank, size, store, host=config.host, token=read_token(config.token_file), shape=job.shape
    )
    return World(rank, size, peers)


class Autocast(nn.Module):
    """Run a stage's forward pass in bf16 autocast; its hidden states stay float32."""

    def __init__(self, stage: Stage, enabled: bool) -> None:
        super().__init__()
        self.stage, self.enabled = stage, enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.enabled):
            out: Tensor = self.stage(x)
        return out


def build_stages(job: Job, world: World) -> list[CompressedStage]:
    """Return this rank's stages: every ``size``-th of the pipeline, its tensors alone in memory."""
    config = job.config
    bf16 = pick_dtype(config.dtype)[0] == "bf16"
    width, rows = job.source.config.hidden_size, config.batch // config.microbatches
    hidden = torch.empty(rows, config.seq, width, device="meta")
    tokens = torch.empty(rows, config.seq, dtype=torch.int64, device="meta")
    logits = torch.empty(rows, config.seq, job.source.config.vocab_size, device="meta")
    stages = []
    for index in range(world.rank, config.stages, world.size):
        module = Autocast(build_stage(job.source, job.cut, index, config.seed), bf16)
        first, last = index == 0, index == config.stages - 1
        stages.append(
            CompressedStage(
                module,
                index,
                config.stages,
                torch.device("cpu"),
                input_args=tokens if first else hidden.clone().requires_grad_(),
                output_args=logits.to(torch.bfloat16 if bf16 else torch.float32) if last else hidden,
                input_grads=None if first else hidden,
                output_grads=None if last else hidden,
                peers=world.peers,
                recipe=job.recipe,
                deadline=config.deadline,
            )
        )
    return stages


def build_schedule(job: Job, stages: list[CompressedStage]) -> Any:
    """Return torch's own schedule over the stages."""
    n, name = job.config.microbatches, job.config.schedule
    if name == "interleaved1f1b":
        return ScheduleInterleaved1F1B(list(stages), n, loss_fn=next_token_loss)
    cls = ScheduleGPipe if name == "gpipe" else Schedule1F1B
    return cls(stages[0], n, loss_fn=next_token_loss)


def pick_threads(config: Any) -> int:
    """Return the compute threads of one rank: as asked, or this machine's cores shared out."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(config.threads) or max(1, cores() // local)
