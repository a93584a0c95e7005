"""One rank of a DDP run that goes through all checks of the hook: ``python hook_ranks.py RANK STORE``.

Two ranks go through those of this file, then through ``loop_ranks.py``, and with a third one through
``site_ranks.py``: one process each, since to start one costs more than most checks. It prints the name
of each check that passed. All ranks make the same calls in the same order.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.uses.training.replicas import loop_ranks, site_ranks
from tests.uses.training.replicas.site_ranks import SYNC_BUFFERS
from thinwire.uses.training.replicas import ddp_hook as hooks
from thinwire.uses.training.replicas.ddp_hook import Replicated
from thinwire.uses.training.replicas.transport import ReplicaNotFinite

RANK, WORLD, LONG = int(sys.argv[1]), 2, 60.0
IDENTITY, SPARSE = "exchange=Gradients()", "dd-ef-sgd:ratio=0.05,staleness=2"
LATE = "exchange=Gradients(staleness=2)"
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


class Student:
    """A small model of several buckets, which DDP cuts in another way after the first pass."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01, **options)  # type: ignore[arg-type]
        self.optimiser = torch.optim.SGD(self.ddp.parameters(), 0.05, momentum=0.9)
        self.steps = 0

    def loss(self) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * RANK + self.steps)
        self.steps += 1
        x = torch.randn(8, 16, generator=draw)
        loss: Tensor = nn.functional.cross_entropy(self.ddp(x), x[:, :3].argmax(1))
        return loss

    def train(self, steps: int, replicated: Replicated | None = None, micro: int = 1) -> None:
        for _ in range(steps):
            self.optimiser.zero_grad()
            for k in range(micro):
                with self.ddp.no_sync() if k < micro - 1 else nullcontext():
                    self.loss().backward()
            if replicated is None or replicated.ready:
                self.optimiser.step()

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.ddp.parameters()])


def equal_everywhere(weights: Tensor) -> bool:
    """Return whether both ranks hold the same bits."""
    all_of_them = [torch.empty_like(weights) for _ in range(WORLD)]
    dist.all_gather(all_of_them, weights)
    return torch.equal(*all_of_them) and bool(weights.isfinite().all())


@contextmanager
def replicating(student: Student, recipe: str, over: str = "peers", **options: Any) -> Iterator[Replicated]:
    """Hook a student up by the mesh, or by a group of its own."""
    group = dist.new_group(backend="gloo") if over == "group" else None
    way = {"peers": MESH[over]} if group is None else {"group": group}
    replicated = thinwire.replicate(student.ddp, recipe, deadline=LONG, **way, **options)
    yield replicated
    replicated.close()
    if group is not None:
        dist.destroy_process_group(group)


MESH: dict[str, Any] = {}


@check
def identity_is_bit_equal_to_ddp() -> None:
    for over in ("group", "peers"):
        plain, ours = Student(), Student()
        with replicating(ours, IDENTITY, over) as replicated:
            for _ in range(4):
                plain.train(6)
                ours.train(6, replicated)
                assert torch.equal(plain.weights(), ours.weights())
    plain, ours = Student(), Student(gradient_as_bucket_view=True, static_graph=True)
    with replicating(ours, "allreduce") as replicated:
        plain.train(8)
        ours.train(8, replicated)
    assert torch.equal(plain.weights(), ours.weights())


def delayed(steps: int, late: int) -> Tensor:
    """Return the weights of plain DDP whose gradients are applied ``late`` steps later."""
    student, waiting = Student(), []

    def apply(gradients: list[Tensor]) -> None:
        for p, g in zip(student.ddp.parameters(), gradients, strict=True):
            p.grad = g
        student.optimiser.step()

    for _ in range(steps):
        student.optimiser.zero_grad()
        student.loss().backward()
        waiting.append([p.grad.clone() for p in student.ddp.parameters()])
        if len(waiting) > late:
            apply(waiting.pop(0))
    for gradients in waiting:
        apply(gradients)
    return student.weights()


@check
def a_delay_equals_the_reference() -> None:
    for over in ("group", "peers"):
        ours = Student()
        with replicating(ours, LATE, over) as replicated:
            ours.train(2, replicated)
            assert not replicated.ready
            ours.train(8, replicated)
            assert replicated.ready
            replicated.drain(ours.optimiser.step)
        assert torch.equal(ours.weights(), delayed(10, 2))


@check
def a_delay_waits_for_nobody() -> None:
    """While rank 1 stands still, rank 0 goes as many steps ahead as the delay is long; and the reverse.

    Also where DDP would broadcast buffers before each forward pass.
    """
    for over, last in (("group", 1), ("peers", 1), ("peers", 0)):
        ours = Student()
        ours.ddp = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(16), *ours.ddp.module))
        with replicating(ours, LATE, over) as replicated:
            ours.train(4, replicated)
            if last == RANK:
                STORE.get(f"ahead of {last} over {over}")
            ours.train(2, replicated)
            if last != RANK:
                STORE.set(f"ahead of {last} over {over}", "yes")
            replicated.drain(ours.optimiser.step)
        assert equal_everywhere(ours.weights())


@check
def new_buckets_lose_no_residuals() -> None:
    """pytorch 48670, 48867: also without exact passes, all that was a gradient arrives or is kept back."""
    student, layouts = Student(), set()
    kept, hooks.EXACT = hooks.EXACT, 0
    with replicating(student, "exchange=Gradients(Scheme(ChunkTopK(0.1), ErrorFeedback()), exact=0)") as ours:
        take = ours._buckets.take

        def watch(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            layouts.add((bucket.index(), tuple(map(id, bucket.parameters()))))
            return take(bucket)

        ours._buckets.take = watch  # type: ignore[method-assign]
        names = dict(student.ddp.module.named_parameters())
        constant = {
            n: torch.randn(p.shape, generator=torch.Generator().manual_seed(9)) for n, p in names.items()
        }
        total = {n: torch.zeros_like(p) for n, p in names.items()}
        for step in range(12):
            student.optimiser.zero_grad()
            x = torch.zeros(1, 16)
            loss = 0.0 * student.ddp(x).sum()
            loss = loss + sum((p * constant[n]).sum() for n, p in names.items())
            loss.backward()
            for n, p in names.items():
                total[n] += p.grad
            if step == 0:
                first = set(layouts)
            assert ours.ready
        state = ours.state_dict()
    hooks.EXACT = kept
    assert layouts - first, "DDP no longer lays its buckets out anew"
    for n, value in total.items():
        torch.testing.assert_close(value + state[f"residual.{n}"], 12 * constant[n], rtol=1e-3, atol=0.2)


@check
def accumulation_without_sync_is_ddp_s() -> None:
    plain, ours = Student(), Student()
    with replicating(ours, IDENTITY) as replicated:
        plain.train(8, micro=3)
        ours.train(8, replicated, micro=3)
    assert torch.equal(plain.weights(), ours.weights())


def backward(student: Student, scaler: torch.amp.GradScaler, damaged: bool = False) -> None:
    """Run a backward pass, which ends in an infinity on rank 1 if ``damaged``."""
    student.optimiser.zero_grad()
    weight = next(student.ddp.parameters())
    value = float("inf") if damaged and RANK == 1 else 1.0
    handle = weight.register_hook(lambda g: g.index_fill(0, torch.tensor(0), value) if damaged else g)
    scaler.scale(student.loss()).backward()
    handle.remove()


@check
def a_drain_averages_the_statistics_of_batch_norm() -> None:
    for broadcasts in (False, True):
        student = Student()
        norm = nn.BatchNorm1d(16).requires_grad_(False)
        norm.register_buffer("own", torch.tensor([torch.inf, RANK]))
        norm.register_module("wide", nn.BatchNorm1d(2, affine=False, dtype=torch.float64))
        student.ddp = DistributedDataParallel(
            nn.Sequential(norm, *student.ddp.module), **{SYNC_BUFFERS: broadcasts}, init_sync=False
        )
        with replicating(student, LATE) as replicated:
            norm.eval()
            norm.running_mean += RANK / 3
            norm.wide.running_var += RANK / 3
            student.train(2, replicated)
            replicated.drain(student.optimiser.step)
        torch.testing.assert_close(norm.running_mean, torch.full((16,), 1 / 6))
        wide = torch.full((2,), (1 + (1 + 1 / 3)) / 2, dtype=torch.float64)
        assert torch.equal(norm.wide.running_var, wide)
        assert torch.equal(norm.own, torch.tensor([torch.inf, 0.0 if broadcasts else RANK]))


@check
def an_infinite_gradient_skips_the_step_on_all_ranks() -> None:
    """pytorch 49374."""
    for recipe, late in ((SPARSE, 2), ("topk:ratio=0.05", 0)):
        student, scaler = Student(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        with replicating(student, recipe, scaler=scaler) as replicated:
            scales = []
            for step in range(12):
                backward(student, scaler, damaged=step == 4)
                before = student.weights()
                if replicated.ready:
                    scaler.step(student.optimiser)
                    scaler.update()
                scales.append(scaler.get_scale())
                skipped = torch.equal(before, student.weights())
                assert skipped == (step < late or step == 4 + late), (step, late)
            state = replicated.state_dict()
        assert scales[-1] == 512.0 and scales[3 + late] == 1024.0
        residuals = [x for n, x in state.items() if n.startswith("residual.")]
        assert residuals and all(x.isfinite().all() for x in residuals)
        assert equal_everywhere(student.weights())


@check
def without_a_scaler_it_ends_every_rank_with_a_name() -> None:
    student = Student()
    with replicating(student, "topk:ratio=0.05") as replicated:
        student.train(3, replicated)
        with pytest.raises(
            ReplicaNotFinite, match=r"rank 1 has to send is not finite .*give replicate your scaler"
        ):
            backward(student, torch.amp.GradScaler("cpu", enabled=False), damaged=True)


@check
def a_scale_that_moves_does_not_change_what_is_late() -> None:
    ours, scaler = Student(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    with replicating(ours, LATE, scaler=scaler) as replicated:
        for _ in range(10):
            backward(ours, scaler)
            if replicated.ready:
                scaler.step(ours.optimiser)
                scaler.update()
        replicated.drain(lambda: (scaler.step(ours.optimiser), scaler.update()))
    assert scaler.get_scale() > 64.0
    torch.testing.assert_close(ours.weights(), delayed(10, 2), rtol=1e-4, atol=1e-6)


@check
def a_run_goes_on_from_what_was_saved() -> None:
    """pytorch 75666: residuals, and what was not due yet, also where buckets are laid out anew."""
    for over in ("peers", "group"):
        whole = Student()
        with replicating(whole, SPARSE, over) as replicated:
            whole.train(6, replicated)
            saved = {n: x.clone() for n, x in replicated.state_dict().items()}
            weights = {n: x.clone() for n, x in whole.ddp.state_dict().items()}
            moments = whole.optimiser.state_dict()
            moments["state"] = {
                k: {"momentum_buffer": v["momentum_buffer"].clone()} for k, v in moments["state"].items()
            }
            whole.train(6, replicated)
            replicated.drain(whole.optimiser.step)
        later = Student()
        later.ddp.load_state_dict(weights)
        later.optimiser.load_state_dict(moments)
        later.steps = 6
        with replicating(later, SPARSE, "more" if over == "peers" else over) as replicated:
            replicated.load_state_dict(saved)
            later.train(6, replicated)
            replicated.drain(later.optimiser.step)
        assert any(n.startswith("held1.") for n in saved)
        assert torch.equal(whole.weights(), later.weights()) and equal_everywhere(later.weights())


@check
def plain_ddp_with_the_default_recipe() -> None:
    student = Student()
    replicated = thinwire.replicate(student.ddp, peers=MESH["third"])
    student.train(12, replicated)
    replicated.drain(student.optimiser.step)
    replicated.close()
    assert equal_everywhere(student.weights())


@check
def accelerate_after_prepare() -> None:
    if find_spec("accelerate") is None:
        return
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(16, 3)
    prepared, optimiser = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    group = dist.new_group(backend="gloo")
    replicated = thinwire.replicate(prepared, SPARSE, group=group, scaler=accelerator.scaler)
    start = model.weight.detach().clone()
    for step in range(8):
        optimiser.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + RANK))
        accelerator.backward(prepared(x).square().mean())
        if replicated.ready:
            optimiser.step()
    replicated.drain(optimiser.step)
    replicated.close()
    assert equal_everywhere(model.weight.detach()) and not torch.equal(start, model.weight)


@check
def torch_s_powersgd_is_not_poisoned() -> None:
    student = Student()
    replicated = thinwire.replicate(student.ddp, "powersgd:start=2")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(8):
        backward(student, scaler, damaged=step == 4)
        assert replicated.ready
        scaler.step(student.optimiser)
        scaler.update()
    assert equal_everywhere(student.weights()) and scaler.get_scale() == 2.0


@check
def what_cannot_be_is_one_sentence() -> None:
    group, peers = dist.new_group(backend="gloo"), MESH["peers"]
    student = Student()

    def refused(text: str, recipe: str = SPARSE, model: Any = None, **options: Any) -> None:
        with pytest.raises(thinwire.InputError, match=text):
            thinwire.replicate(model or student.ddp, recipe, **options)

    refused("takes a DistributedDataParallel, not Sequential", model=student.ddp.module, peers=peers)
    refused("give peers of connect_mesh, or a torch group, not both")
    refused("not both", peers=peers, group=group)
    refused("differences of parameters after local steps", "diloco", peers=peers)
    refused("follows the link, of which a torch group tells nothing", "deco", group=group)
    refused("DDP's own group is taken", group=dist.group.WORLD)
    refused("what DDP makes without a hook", "allreduce", group=group)
    unbounded = "exchange=Gradients(Scheme(HardThreshold(1.0), ErrorFeedback()))"
    refused(r"HardThreshold\(threshold=1.0\) may need more bytes than values", unbounded, group=group)
    refused("0 peers are not the 1 other replicas", peers={})
    refused("there is no recipe 'decco'; did you mean deco", "decco", peers=peers)
    refused("powersgd averages over a torch group", "powersgd", peers=peers)
    refused("powersgd: rank=0 is not a whole number in 1..64", "powersgd:rank=0")
    unused = Student(find_unused_parameters=True).ddp
    refused("find_unused_parameters=True loses what is late", model=unused, peers=peers)
    refused(r"rank \[1\] exchanges other|rank \[0\] exchanges other", ("topk", SPARSE)[RANK], peers=peers)
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(9, 4, sparse=True)))
    refused("gradients of 0 are sparse tensors", model=sparse, peers=peers)
    refused_models(refused, peers)
    student.ddp.register_comm_hook(None, allreduce_hook)
    refused("has the hook .*allreduce_hook.* and DDP takes one", peers=peers)


def refused_models(refused: Callable[..., None], peers: Any) -> None:
    """A model that DDP was made of, and what became of it before replicate."""

    def added(m: nn.Module) -> None:
        m.register_parameter("extra", nn.Parameter(torch.ones(3)))

    def frozen(m: nn.Module) -> None:
        m[0].bias.requires_grad_(False)  # type: ignore[index]

    def unlike(m: nn.Module) -> None:
        m[0].weight.data[0, 0] += RANK  # type: ignore[index]

    def as_it_is(m: nn.Module) -> None:
        pass

    for change, dtype, recipe, text in (
        (added, torch.float32, SPARSE, "DDP does not reduce extra, which was added or unfrozen"),
        (frozen, torch.float32, SPARSE, "DDP reduces 1 parameters that were removed or frozen"),
        (nn.Module.half, torch.float32, SPARSE, "0.weight, 0.bias has another dtype than when DDP was made"),
        (unlike, torch.float32, SPARSE, rf"rank \[{1 - RANK}\] starts from other weights"),
        (as_it_is, torch.float64, SPARSE, "0.weight is float64, and what replicas exchange is float32"),
        (as_it_is, torch.complex64, "powersgd", "powersgd takes no parameters that are complex"),
        (unlike, torch.float32, "powersgd", rf"rank \[{1 - RANK}\] starts from other weights"),
    ):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 3, dtype=dtype)))
        change(model.module)
        refused(text, recipe, model, **({} if recipe == "powersgd" else {"peers": peers}))


@check
def what_a_loop_cannot_do_is_one_sentence() -> None:
    def refused(text: str, call: Callable[[], object], error: type[Exception] = thinwire.InputError) -> None:
        with pytest.raises(error, match=text):
            call()

    student = Student()
    with replicating(student, LATE) as ours:
        student.loss().backward()
        refused(
            "neither applied by a step nor cleared; drain behind", lambda: ours.drain(student.optimiser.step)
        )
        refused("neither applied by a step nor cleared; save behind", ours.state_dict)
        student.optimiser.step()
        wrong = "a step of a drain may take no backward pass"
        refused(wrong, lambda: ours.drain(lambda: student.loss().backward()))
        lbfgs = torch.optim.LBFGS(student.ddp.parameters())
        refused("LBFGS needs each gradient at once", lambda: lbfgs.step(lambda: 0.0))
    student = Student()
    with replicating(student, LATE, "group"):
        halves = [torch.optim.SGD([p], 0.1) for p in list(student.ddp.parameters())[:2]]

        def in_turn() -> None:
            for half in halves:
                student.loss().backward()
                half.step()
            student.loss().backward()

        refused("the steps behind the last two passes were of other parameters", in_turn)
    student = Student()
    with replicating(student, LATE, "more"):
        student.train(2)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))
        refused("call replicate.*scaler=scaler", lambda: scaler.step(student.optimiser))
        student.ddp.module.register_parameter("extra", nn.Parameter(torch.ones(3)))
        refused("extra was added or unfrozen after replicate", student.loss().backward)


@check
def a_pass_that_some_ranks_throw_away_ends_all_of_them() -> None:
    student = Student()
    with replicating(student, LATE, "third") as ours:
        for step in range(8):
            student.optimiser.zero_grad()
            if step == 7:
                with pytest.raises(
                    thinwire.ThinwireError, match=r"before exchange 6 rank \[1\] threw the grad"
                ):
                    student.loss().backward()
                break
            student.loss().backward()
            if (step, RANK) != (4, 1):
                student.optimiser.step()
        assert ours.draining is False


@check
def a_state_is_loaded_where_it_was_saved() -> None:
    student = Student()
    with replicating(student, SPARSE) as ours:
        student.train(3, ours)
        state = ours.state_dict()
    theirs: list[Any] = [None, None]
    dist.all_gather_object(theirs, state)
    parts = {n: x for n, x in state.items() if not n.startswith("residual.2")}
    for text, saved, recipe in (
        (rf"saved by rank {1 - RANK} of 2, and this is rank {RANK} of 2", theirs[1 - RANK], SPARSE),
        ("saved with the recipe", state, "topk"),
        ("lacks residual.2.bias, 2.weight", parts, SPARSE),
        ("no state that replicate saved", {n: x for n, x in state.items() if n != "origin"}, SPARSE),
        ("cannot be read", state | {"origin": torch.zeros(3, dtype=torch.uint8)}, SPARSE),
        ("cannot be read .KeyError: 'steps'", {n: x for n, x in state.items() if n != "steps"}, SPARSE),
        (r"0.bias was \[64\] torch.float32 and is missing", state, SPARSE),
    ):
        later = Student()
        if "missing" in text:
            later.ddp = DistributedDataParallel(later.ddp.module[0])
        with replicating(later, recipe) as ours, pytest.raises(thinwire.InputError, match=text):
            ours.load_state_dict(saved)


@check
def a_silent_rank_is_named() -> None:
    student = Student()
    replicated = thinwire.replicate(student.ddp, IDENTITY, peers=MESH["peers"], deadline=0.5)
    if RANK == 0:
        with pytest.raises(thinwire.LinkError, match="rank 1"):
            student.train(1, replicated)
    STORE.set(f"waited {RANK}", "yes")
    STORE.get(f"waited {1 - RANK}")
    replicated.close()


@check
def an_error_of_a_card_ends_the_pass_in_a_sentence_and_the_other_rank_names_it() -> None:
    student = Student()
    replicated = thinwire.replicate(student.ddp, IDENTITY, peers=MESH["peers"], deadline=0.5)
    if RANK == 1:
        replicated._buckets.gradients = broken  # type: ignore[method-assign]
        with pytest.raises(thinwire.ThinwireError, match=r"^this rank could not .* illegal memory access; "):
            student.train(1, replicated)
    else:
        with pytest.raises(thinwire.LinkError, match="rank 1"):
            student.train(1, replicated)
    STORE.set(f"broke {RANK}", "yes")
    STORE.get(f"broke {1 - RANK}")
    replicated.close()


def broken() -> Tensor:
    raise RuntimeError("CUDA error: an illegal memory access\nSearch for it, and so on.")


def two_ranks() -> None:
    dist.init_process_group("gloo", store=STORE, rank=RANK, world_size=WORLD, timeout=timedelta(seconds=LONG))
    for place in ("peers", "more", "third"):
        MESH[place] = thinwire.connect_mesh(RANK, WORLD, STORE, prefix=place)
    for function in CHECKS:
        function()
        print(function.__name__, flush=True)
    loop_ranks.main(MESH)
    print("loops", flush=True)
    for mesh in MESH.values():
        for peer in mesh.values():
            peer.close()
    dist.destroy_process_group()


def three_ranks() -> None:
    STORE.wait([f"two {rank}" for rank in range(WORLD)], timedelta(seconds=5 * LONG))
    sites = dist.FileStore(sys.argv[2] + ".sites", site_ranks.WORLD)
    options: dict[str, Any] = {"rank": RANK, "world_size": site_ranks.WORLD}
    dist.init_process_group("gloo", store=sites, timeout=timedelta(seconds=LONG), **options)
    site_ranks.main(STORE)
    print("sites", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    STORE = dist.FileStore(sys.argv[2], WORLD)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "OMP_NUM_THREADS": "1",
        "RANK": str(RANK),
        "LOCAL_RANK": str(RANK),
        "WORLD_SIZE": str(WORLD),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if RANK < WORLD:
        try:
            two_ranks()
        finally:
            STORE.set(f"two {RANK}", "through")
    three_ranks()
