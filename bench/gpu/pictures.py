"""A picture by two ranks that share a card: ``FluxTransformer2DModel`` at full width with random weights."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import thinwire
from bench.gpu.ranks import RANKS, failing_alone, row, two_ranks, wait
from thinwire.collectives import MeshExchange
from thinwire.uses.pictures.arrivals import Arrivals
from thinwire.uses.pictures.messages import ExchangeTally

FLUX: dict[str, Any] = {"in_channels": 64, "guidance_embeds": False}
TINY: dict[str, Any] = {
    "num_layers": 2, "num_single_layers": 4, "num_attention_heads": 4, "in_channels": 16,
    "joint_attention_dim": 32, "pooled_projection_dim": 32, "attention_head_dim": 16,
    "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
BLOCKS = {"small": (6, 12), "full": (19, 38)}  # double and single
RECIPES = {
    "small": ("compact", "compact-pipe", "displaced", "compact:bits=2", "lowrank", "fp16"),
    "full": ("compact", "compact-pipe"),
}
MANY, FEW, LAST = 12, 6, 4  # steps: the first send whole values, those behind them more bits than the last
EVEN = ("displaced", "fp16")  # of which each step sends as much, and few will do


def measure(device: torch.device, smoke: bool, size: str) -> None:
    """Print a row for one rank alone and one a recipe: milliseconds a step, bytes a step and rank.

    Of the last steps also: the milliseconds that the rank waited for messages and spent on coding, and those
    from a message on the host of one rank to the device of the other.
    """
    two_ranks(_rank, device, smoke, size)


def _rank(rank: int, store: Any, device: torch.device, smoke: bool, size: str) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    double, single = BLOCKS[size]
    shape = TINY if smoke else {**FLUX, "num_layers": double, "num_single_layers": single}
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # 12 G values in float32 would not fit twice
    with torch.device(device):
        model = FluxTransformer2DModel(**shape).eval()
    torch.set_default_dtype(previous)
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, model)
    pipe.set_progress_bar_config(disable=True)
    paint = _Painter(pipe, device, smoke)
    alone: dict[int, torch.Tensor] = {}
    for steps in (FEW, FEW if smoke else MANY) if rank == 0 else ():
        paint(steps)
        alone[steps], seconds = paint(steps)
    if rank == 0:
        row(
            blocks=[double, single],
            recipe="one rank alone",
            steps=max(alone),
            step_ms=_ms(seconds / max(alone)),
        )
    dist.barrier()
    for recipe in RECIPES[size]:
        with failing_alone(blocks=[double, single], recipe=recipe):
            _together(rank, store, paint, alone, recipe, [double, single])


class _MessageClock:
    """When this rank handed its messages to the links, and when it had those of the other on the device.

    Both ranks read one clock, and messages of one rank keep their order.
    """

    def __enter__(self) -> _MessageClock:
        self._undo, self.handed, self.opened = ExitStack(), list[float](), list[float]()
        stock, opening = MeshExchange.hand_over, Arrivals.open

        def hand_over(exchange: Any, step: int, payloads: Any) -> None:
            self.handed.append(time.monotonic())
            stock(exchange, step, payloads)

        def opened(arrivals: Any, body: bytes) -> Any:
            found = opening(arrivals, body)
            self.opened.append(time.monotonic())
            return found

        self._undo.enter_context(patch.object(MeshExchange, "hand_over", hand_over))
        self._undo.enter_context(patch.object(Arrivals, "open", opened))
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def clear(self) -> None:
        """Begin anew, while nothing is on its way."""
        self.handed.clear()
        self.opened.clear()

    def seconds(self, rank: int, store: Any, share: float) -> list[float]:
        """Return how long each of the last messages took to this rank: this share of all. All ranks call."""
        store.set(f"handed {rank}", json.dumps(self.handed))
        handed = json.loads(store.get(f"handed {RANKS - 1 - rank}"))
        count = round(share * min(len(handed), len(self.opened)))
        return [b - a for a, b in zip(handed[-count:], self.opened[-count:], strict=True)]


class _Painter:
    tally = ExchangeTally()

    def __init__(self, pipe: Any, device: torch.device, smoke: bool) -> None:
        self.pipe, self.device, self.smoke = pipe, device, smoke
        self.side, length, width, pooled = (96, 7, 32, 32) if smoke else (1024, 512, 4096, 768)
        seeded = torch.Generator().manual_seed(1)
        self.prompt = {
            name: torch.randn(size, generator=seeded).to(device, torch.bfloat16)
            for name, size in (("prompt_embeds", (1, length, width)), ("pooled_prompt_embeds", (1, pooled)))
        }

    @torch.no_grad()
    def __call__(self, steps: int) -> tuple[torch.Tensor, float]:
        """Return the latents, and the seconds that they took."""
        wait(self.device)
        start = time.perf_counter()
        ticks, told = [start], [self._told()]

        def ticked(_pipe: Any, _step: int, _time: Any, kept: Any) -> Any:
            ticks.append(time.perf_counter())
            told.append(self._told())
            return kept

        made = self.pipe(
            **self.prompt, height=self.side, width=self.side, num_inference_steps=steps, output_type="latent",
            callback_on_step_end=ticked, generator=torch.Generator().manual_seed(0),
        ).images  # fmt: skip
        wait(self.device)
        self.steps = [b - a for a, b in itertools.pairwise(ticks)]
        self.waited, self.coded = ((b - a) / LAST for a, b in zip(told[-1 - LAST], told[-1], strict=True))
        return made.float().cpu(), time.perf_counter() - start

    def _told(self) -> tuple[float, float]:
        return self.tally.wait_s, self.tally.code_s


def _together(
    rank: int, store: Any, paint: _Painter, alone: dict[int, torch.Tensor], recipe: str, blocks: list[int]
) -> None:
    steps = FEW if paint.smoke or recipe in EVEN else MANY
    peers = thinwire.connect_mesh(rank, RANKS, dist.PrefixStore(f"picture {recipe}", store))
    try:
        with _MessageClock() as clock, thinwire.parallel(paint.pipe.transformer, peers, recipe) as parallel:
            paint.tally = parallel.tally
            paint(steps)
            dist.barrier()
            clock.clear()
            before = parallel.tally.nbytes
            made, seconds = paint(steps)
            nbytes, late = parallel.tally.nbytes - before, statistics.median(paint.steps[-LAST:])
            dist.barrier()
            spent = clock.seconds(rank, dist.PrefixStore(f"clock {recipe}", store), LAST / steps)
        if rank == 0:
            error = (made - alone[steps]).pow(2).mean()
            ratio = float(10 * torch.log10(alone[steps].abs().max() ** 2 / error))
            row(
                blocks=blocks, recipe=recipe, steps=steps, step_ms=_ms(seconds / steps), last_ms=_ms(late),
                waited_ms=_ms(paint.waited), coded_ms=_ms(paint.coded), messages=len(spent) / LAST,
                message_ms=round(1e3 * statistics.median(spent), 2), step_nbytes=round(nbytes / steps),
                latents_db=round(ratio, 1),
            )  # fmt: skip
        dist.barrier()
    finally:
        for peer in peers.values():
            peer.close()


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)
