"""The loops people write, of which a rank of ``hook_ranks.py`` goes through all.

Gradients here do not depend on the weights. So a recipe that is exact and late has to end with the very bits
of plain DDP, once it is drained: every gradient is applied once, in order, by the whole of the user's step.
"""

from __future__ import annotations

import copy
import io
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import thinwire

RANK, LONG = int(sys.argv[1]), 60.0
MESH: dict[str, Any] = {}
LATE = "exchange=Gradients(staleness=2)"
FED_BACK = "exchange=Gradients(Scheme(ChunkTopK(0.1), ErrorFeedback()), staleness={})"
ODD = {"b": (), "c": (0, 3)}
Steps = Callable[[], object]


class Slopes(nn.Module):
    """A model whose loss has the gradient that a seed and the rank draw."""

    def __init__(self, dtype: torch.dtype = torch.float32, odd: bool = True) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        for name, shape in {"a": (40, 30), "d": (300,), **(ODD if odd else {})}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draw).to(dtype)))

    def forward(self, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(7 * seed + RANK)
        kinds = [(p, torch.randn(p.shape, generator=draw, dtype=p.dtype)) for p in self.parameters()]
        parts = [(p * c).sum() for p, c in kinds]
        return sum(x.real if x.is_complex() else x for x in parts).float()  # type: ignore[union-attr]


class Loop:
    """What a loop is written with: a model, its optimiser, and what exchanges, or None for plain DDP."""

    def __init__(
        self, recipe: str | None, dtype: torch.dtype = torch.float32, odd: bool = True, **options: Any
    ) -> None:
        self.scaler = options.pop("scaler", None)
        self.module = Slopes(dtype, odd)
        self.ddp = DistributedDataParallel(self.module, bucket_cap_mb=0.002, **options)  # type: ignore[arg-type]
        self.optimiser: Any = torch.optim.AdamW(self.ddp.parameters(), 0.01, weight_decay=0.1)
        self.replicated: Any = None
        if recipe is not None:
            self.replicated = thinwire.replicate(
                self.ddp, recipe, peers=MESH["peers"], scaler=self.scaler, deadline=LONG
            )

    def drain(self, step: Steps) -> None:
        if self.replicated is not None:
            self.replicated.drain(step)

    def close(self) -> Tensor:
        if self.replicated is not None:
            self.replicated.close()
        return torch.cat(
            [
                torch.view_as_real(p).flatten() if p.is_complex() else p.flatten()
                for p in self.module.parameters()
            ]
        )


def asks_ready(loop: Loop) -> None:
    for seed in range(9):
        loop.optimiser.zero_grad()
        loop.ddp(seed).backward()
        if loop.replicated is None or loop.replicated.ready:
            loop.optimiser.step()
    loop.drain(loop.optimiser.step)


def always_steps(loop: Loop) -> None:
    for seed in range(9):
        loop.ddp(seed).backward()
        loop.optimiser.step()
        loop.optimiser.zero_grad(set_to_none=seed % 2 == 0)
        if seed % 4 == 3:
            loop.drain(loop.optimiser.step)
    loop.drain(loop.optimiser.step)


def accumulates(loop: Loop) -> None:
    """A drain may come between two passes of one step."""
    for seed in range(24):
        with loop.ddp.no_sync() if seed % 3 < 2 else nullcontext():
            loop.ddp(seed).backward()
        if seed % 3 == 2:
            loop.optimiser.step()
            loop.optimiser.zero_grad()
        if seed % 7 in (3, 4) and seed % 3 != 2:
            loop.drain(loop.optimiser.step)
    loop.drain(loop.optimiser.step)


def clips_and_schedules(loop: Loop) -> None:
    schedule = torch.optim.lr_scheduler.OneCycleLR(loop.optimiser, 0.1, total_steps=12)

    def step() -> None:
        clip_grad_norm_(loop.ddp.parameters(), 0.5)
        loop.optimiser.step()
        schedule.step()

    for seed in range(12):
        loop.optimiser.zero_grad()
        loop.ddp(seed).backward()
        if loop.replicated is None or loop.replicated.ready:
            step()
    loop.drain(step)


def _scaled(loop: Loop, drained: Steps, clips: bool = True) -> None:
    scaler = loop.scaler
    for seed in range(9):
        loop.optimiser.zero_grad()
        scaler.scale(loop.ddp(seed)).backward()
        if clips:
            scaler.unscale_(loop.optimiser)
            clip_grad_norm_(loop.ddp.parameters(), 1.0)
        scaler.step(loop.optimiser)
        scaler.update()
    loop.drain(drained)


def scales(loop: Loop) -> None:
    def step() -> None:
        loop.scaler.unscale_(loop.optimiser)
        clip_grad_norm_(loop.ddp.parameters(), 1.0)
        loop.scaler.step(loop.optimiser)
        loop.scaler.update()

    _scaled(loop, step)


def drains_past_the_scaler(loop: Loop) -> None:
    _scaled(loop, loop.optimiser.step, clips=False)


def drains_without_an_update(loop: Loop) -> None:
    def step() -> None:
        loop.scaler.unscale_(loop.optimiser)
        clip_grad_norm_(loop.ddp.parameters(), 1.0)
        loop.scaler.step(loop.optimiser)

    _scaled(loop, step)


def throws_away(loop: Loop, thrown: bool = True) -> None:
    """As the two networks of a GAN do to each other; also before the first step, and twice in a row."""
    for seed in range(9):
        for _ in range(seed % 3 if thrown else 0):
            loop.ddp(100 + seed).backward()
        loop.optimiser.zero_grad(set_to_none=seed % 2 == 0)
        loop.ddp(seed).backward()
        loop.optimiser.step()
        if thrown and seed % 4 == 1:
            loop.optimiser.zero_grad()
            loop.ddp(200 + seed).backward()
            loop.optimiser.zero_grad()
            loop.drain(loop.optimiser.step)
        elif seed % 4 == 1:
            loop.drain(loop.optimiser.step)
    loop.drain(loop.optimiser.step)


def evaluates_closures(loop: Loop) -> None:
    for seed in range(9):

        def closure(seed: int = seed) -> Tensor:
            loop.optimiser.zero_grad()
            loss: Tensor = loop.ddp(seed)
            loss.backward()
            return loss

        loop.optimiser.step(closure)
    loop.drain(loop.optimiser.step)


def has_two_optimisers(loop: Loop) -> None:
    head = torch.nn.Parameter(torch.zeros(3))  # of no DDP, with a gradient of its own
    one = torch.optim.SGD([loop.module.a, loop.module.b, head], 0.1, momentum=0.9)
    two = torch.optim.RMSprop([loop.module.c, loop.module.d], 0.01)

    def step() -> None:
        one.step()
        two.step()

    for seed in range(9):
        one.zero_grad()
        two.zero_grad()
        loop.ddp(seed).backward()
        head.grad = torch.ones(3)
        step()
    loop.drain(step)
    plain = nn.Parameter(torch.zeros(3))
    alone = torch.optim.SGD([plain], 0.1, momentum=0.9)
    for _ in range(9):
        plain.grad = torch.ones(3)
        alone.step()
    assert torch.equal(head, plain) and head.grad is not None


def steps_by_hand(loop: Loop) -> None:
    for seed in range(9):
        loop.ddp(seed).backward()
        _by_hand(loop)
        loop.ddp.zero_grad()
    loop.drain(lambda: _by_hand(loop))


def _by_hand(loop: Loop) -> None:
    with torch.no_grad():
        for p in loop.module.parameters():
            p -= 0.1 * p.grad  # type: ignore[operator]


def has_gradients_of_zeros(loop: Loop) -> None:
    """As where all targets of a batch are left out; and turned over by hand, which makes -0 of 0."""
    for seed in range(9):
        loop.optimiser.zero_grad(set_to_none=seed % 2 == 0)
        (loop.ddp(seed) * (seed != 4)).backward()
        _ascend(loop)
    loop.drain(lambda: _ascend(loop))


def _ascend(loop: Loop) -> None:
    for p in loop.module.parameters():
        p.grad.neg_()  # type: ignore[union-attr]
    loop.optimiser.step()


def has_passes_of_other_kinds(loop: Loop) -> None:
    """Gradients that are asked for beside a pass, and a pass that fails and is thrown away."""

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    for seed in range(6):
        if seed in (1, 4):
            handle = loop.module.a.register_hook(fail)
            with suppress(ArithmeticError), loop.ddp.no_sync():
                loop.ddp(100).backward()
            handle.remove()
            loop.optimiser.zero_grad()
            loop.ddp(100).backward()
        loop.optimiser.zero_grad()
        loop.ddp(seed).backward()
        torch.autograd.grad(loop.module(seed), list(loop.module.parameters()))
        loop.optimiser.step()
    loop.drain(loop.optimiser.step)


def keeps_averages(loop: Loop) -> None:
    average = torch.optim.swa_utils.AveragedModel(loop.ddp)
    for seed in range(5):
        loop.optimiser.zero_grad()
        loop.ddp(seed).backward()
        loop.optimiser.step()
        average.update_parameters(loop.ddp)
        copied, saved = copy.deepcopy(loop.ddp), io.BytesIO()
        torch.save(loop.ddp, saved)
        saved.seek(0)
        torch.save(loop.module, io.BytesIO())
        loaded = torch.load(saved, weights_only=False)
        for other in (copied, loaded):
            for p, q in zip(other.parameters(), loop.ddp.parameters(), strict=True):
                assert torch.equal(p, q) and p is not q
    loop.drain(loop.optimiser.step)
    copied.zero_grad()
    copied(3).backward()  # a copy is a DDP of its own, which may be hooked up
    if loop.replicated is not None:
        thinwire.replicate(loaded, LATE, peers=MESH["more"]).close()


LOOPS = [
    asks_ready,
    always_steps,
    accumulates,
    clips_and_schedules,
    scales,
    drains_past_the_scaler,
    drains_without_an_update,
    evaluates_closures,
    has_two_optimisers,
    steps_by_hand,
    has_gradients_of_zeros,
    has_passes_of_other_kinds,
    keeps_averages,
]
KINDS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "complex": {"dtype": torch.complex64},
    "half": {"dtype": torch.bfloat16},
}


def scaler(loop: Callable[[Loop], None]) -> dict[str, Any]:
    scales = "scale" in loop.__name__ or loop.__name__ == "drains_without_an_update"
    return {"scaler": torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)} if scales else {}


def check(name: str, write: Callable[[Loop], None], recipe: str = LATE, **options: Any) -> None:
    plain, ours = Loop(None, **options, **scaler(write)), Loop(recipe, **options, **scaler(write))
    write(plain)
    write(ours)
    a, b = plain.close(), ours.close()
    assert torch.equal(a, b), (name, (a - b).abs().max())
    print(name, flush=True)


def check_thrown(recipe: str) -> None:
    """What is thrown away changes nothing: not what is late, and not what is kept back."""
    with_them, without = Loop(recipe), Loop(recipe)
    for loop in (with_them, without):
        for seed in (300, 301):  # exact, whatever becomes of them
            loop.ddp(seed).backward()
            loop.optimiser.step()
    throws_away(with_them)
    throws_away(without, thrown=False)
    assert torch.equal(with_them.close(), without.close()), recipe
    print("thrown", recipe, flush=True)


def check_powersgd() -> None:
    """Torch's residuals know nothing of what was thrown away either."""
    ends = []
    for thrown in (False, True):
        loop = Loop(None, odd=False)
        loop.replicated = thinwire.replicate(loop.ddp, "powersgd:start=2")
        throws_away(loop, thrown)
        ends.append(loop.close())
    assert torch.equal(*ends)


def main(mesh: dict[str, Any]) -> None:
    MESH.update(mesh)
    with warnings.catch_warnings(action="error"):
        for write in LOOPS:
            check(write.__name__, write)
        check("throws_away", throws_away)
        for kind, options in KINDS.items():
            check(f"always_steps {kind}", always_steps, **options)
            check(f"throws_away {kind}", throws_away, **options)
        for late in (0, 2):
            check_thrown(FED_BACK.format(late))
        check_powersgd()
