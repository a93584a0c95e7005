"""Local steps in loops as people write them: all replicas end with the same bits, or none goes on."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from each import each
from meshes import Mesh, meshes, together
from torch import Tensor, nn

from thinwire.types import InputError, LinkError, ThinwireError
from thinwire.uses.training.replicas.loop.script import local_steps
from thinwire.uses.training.replicas.loop.shared_training import SharedTraining
from thinwire.uses.training.replicas.transport import ReplicaNotFinite

RECIPES = ["auto", "thinwire", "sparseloco:every=5", "pulseloco:every=4", "diloco:every=7", "cocktail"]
RECIPES += ["streaming:every=6", "thinwire:every=1,late=0"]
STRICT = "thinwire:every=2,late=0"
EXACT = "exchange=Differences(every=1)"


class Net(nn.Module):
    """Layers with a norm, one that is frozen, and an output tied to the input."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.into, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.fixed = nn.Linear(16, 16).requires_grad_(False)
        self.out = nn.Linear(16, 8)
        self.out.weight = nn.Parameter(self.into.weight.detach().T.contiguous())
        self.tied = self.out  # the same parameters under another name

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.fixed(self.norm(self.into(x)).relu()))
        return found


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * rank + step)).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = batch(rank, step, next(model.parameters()).dtype)
    found: Tensor = (model(x) - x.flip(1)).square().mean()
    return found


Make = Callable[[list[nn.Parameter]], Any]
Loop = Callable[[int, nn.Module, Any, SharedTraining], None]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


def train(rank: int, model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def plain(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
    train(rank, model, optimizer, 15)
    training.drain()
    train(rank, model, optimizer, 15, first=15)


def run(
    recipe: str, loop: Loop = plain, make: Make = adamw, first: nn.Module | None = None, world: int = 2
) -> list[nn.Module]:
    """Train replicas in threads, and return their models: alike to the bit."""
    models = [copy.deepcopy(first or Net()) for _ in range(world)]

    def replica(rank: int, peers: Mesh) -> None:
        optimizer = make([p for p in models[rank].parameters() if p.requires_grad])
        with local_steps(models[rank], optimizer, recipe, peers=peers, deadline=20.0) as training:
            loop(rank, models[rank], optimizer, training)
            training.drain()

    with meshes(world) as ranks:
        together([lambda r=r: replica(r, ranks[r]) for r in range(world)])
    assert alike(*models) and not alike(models[0], first or Net())
    return models


def alike(*models: nn.Module) -> bool:
    first, *others = [list(m.state_dict().values()) for m in models]
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@each("recipe", RECIPES)
def test_replicas_end_with_the_same_bits(recipe: str) -> None:
    for model in run(recipe, world=3 if recipe == "thinwire" else 2):
        assert float(loss_of(model.eval(), 7, 7).detach()) < 1.0


def test_an_exact_recipe_of_one_step_is_the_mean_of_all_steps() -> None:
    """SGD is linear: the mean of replicas' steps is the step along the mean of their gradients."""
    first = nn.Linear(8, 8)
    (model, _) = run(EXACT, make=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), first=first)
    alone = copy.deepcopy(first)
    optimizer = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    for step in range(30):
        optimizer.zero_grad()
        (sum(loss_of(alone, rank, step) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def accumulating(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for step in range(40):
        (loss_of(model, rank, step) / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


def with_a_closure(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, rank, 0)
        loss.backward()
        return loss

    for _ in range(12):
        optimizer.step(closure)


def scaled(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(30):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, rank, step))
        (loss * torch.inf if step == 3 + rank else loss).backward()  # a step that one replica leaves out
        scaler.step(optimizer)
        scaler.update()
    fused = optimizer.defaults.get("fused")  # then the step itself leaves out what is not finite
    assert training.steps == (30 if fused else 29)


def looking(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
    plain(rank, model, optimizer, training)
    own = [p.clone() for p in model.parameters()]
    with training.shared():
        assert not all(map(torch.equal, own, model.parameters()))
    assert all(map(torch.equal, own, model.parameters()))


def in_groups(parameters: list[nn.Parameter]) -> Any:
    return torch.optim.AdamW([{"params": parameters[:1], "lr": 0.01}, {"params": parameters[1:]}], 0.02)


def in_backward(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
    for step in range(30):
        loss_of(model, rank, step).backward()
    assert training.steps == 30


def of_each(parameters: list[nn.Parameter]) -> Any:
    """Return an optimiser of each parameter, which steps as soon as its gradient is there."""
    optimizers = {p: torch.optim.AdamW([p], 0.01) for p in parameters}

    def step(p: nn.Parameter) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in parameters:
        p.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def two_optimizers(parameters: list[nn.Parameter]) -> Any:
    class Both(list[torch.optim.Optimizer]):
        def step(self) -> None:
            for one in self:
                one.step()

        def zero_grad(self) -> None:
            for one in self:
                one.zero_grad()

    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    return Both([torch.optim.Muon(matrices, 0.01), torch.optim.AdamW(others, 0.01)])


@each(
    "loop, make",
    [
        (accumulating, adamw),
        (with_a_closure, lambda p: torch.optim.LBFGS(p, max_iter=2)),
        (scaled, adamw),
        (scaled, lambda p: torch.optim.SGD(p, 0.05, fused=True)),
        (looking, in_groups),
        (plain, two_optimizers),
        (in_backward, of_each),
    ],
)
def test_loops_as_people_write_them(loop: Loop, make: Make) -> None:
    run("thinwire:every=4,late=1", loop, make)


def test_models_as_people_have_them() -> None:
    run("thinwire:every=4", first=Net().to(torch.bfloat16))
    run("thinwire:every=4", first=nn.Linear(8, 8, dtype=torch.float64).float())
    nested = nn.Sequential(Net(), nn.Identity())
    run("auto", first=nested)


def test_what_bfloat16_drops_is_not_lost() -> None:
    """Steps too small for a parameter in bfloat16 add up over the exchanges."""
    first = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        first.weight.fill_(1.0)

    def loop(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
        for step in range(16):
            with torch.no_grad():  # one of eight steps is seen at one of two replicas
                next(model.parameters()).grad = torch.full((1, 1), 0.0, dtype=torch.bfloat16)
                optimizer.step()
                if step % 2 == 0 and rank == 0:
                    next(model.parameters()).sub_(2.0**-7)

    (model, _) = run("exchange=Differences(every=2)", loop, lambda p: torch.optim.SGD(p, 0.1), first)
    assert float(next(model.parameters()).detach()) == pytest.approx(1.0 - 8 * 2.0**-8, abs=2.0**-8)


@each("recipe", ["sparseloco:every=4", "streaming:every=6", "diloco:every=4"])
def test_a_state_goes_on_to_the_same_bits(recipe: str) -> None:
    saved: dict[int, dict[str, Any]] = {}

    def loop(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
        plain(rank, model, optimizer, training)
        training.drain()
        saved[rank] = {"model": copy.deepcopy(model), "optimizer": copy.deepcopy(optimizer.state_dict())}
        saved[rank]["state"] = {k: v.clone() for k, v in training.state_dict().items()}
        plain(rank, model, optimizer, training)

    models = run(recipe, loop)
    again = [saved[rank]["model"] for rank in range(2)]

    def resumed(rank: int, peers: Mesh) -> None:
        optimizer = adamw([p for p in again[rank].parameters() if p.requires_grad])
        optimizer.load_state_dict(saved[rank]["optimizer"])
        with local_steps(again[rank], optimizer, recipe, peers=peers) as training:
            with pytest.raises(InputError, match="saved by rank"):
                training.load_state_dict(saved[1 - rank]["state"])
            training.load_state_dict(saved[rank]["state"])
            plain(rank, again[rank], optimizer, training)
            training.drain()

    with meshes(2) as ranks:
        together([lambda r=r: resumed(r, ranks[r]) for r in range(2)])
    assert alike(*models, *again)


def saved_by(ranks: int) -> list[dict[str, Tensor]]:
    """Return what replicas save after a few steps."""
    saved: list[dict[str, Tensor]] = [{}] * ranks

    def loop(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
        train(rank, model, optimizer, 6)
        training.drain()
        saved[rank] = training.state_dict()

    run(STRICT, loop, world=ranks)
    return saved


def test_replicas_that_go_on_otherwise_are_named() -> None:
    """None waits for a message of another count, or learns at a stale rate, without a word."""
    of_three, of_two = saved_by(3), saved_by(2)

    def of_another_number(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
        with pytest.raises(InputError, match=r"saved by rank . of 3, and this is rank . of 2"):
            training.load_state_dict(of_three[rank])
        train(rank, model, optimizer, 4)

    def alone(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
        if rank:
            training.load_state_dict(of_two[rank])
        train(rank, model, optimizer, 8)

    def with_a_stale_rate(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
        if rank:
            optimizer.param_groups[0]["lr"] = 0.007
        train(rank, model, optimizer, 8)

    run(STRICT, of_another_number)
    for error in ended(alone):
        assert isinstance(error, InputError) and "goes on from step" in str(error)
    with pytest.warns(UserWarning, match=r"rate 0.0\d* at rank ., and at 0.0\d* here"):
        run(STRICT, with_a_stale_rate)


@each("recipe", ["thinwire:every=4,late=1", "streaming:every=4"])
def test_a_drain_waits_for_steps_of_an_exchange(recipe: str) -> None:
    """As a gradient scaler leaves out steps of one replica alone."""

    def loop(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
        for steps in (9, 8), (8, 7), (7, 8), (8, 8), (5, 2):
            train(rank, model, optimizer, steps[rank])
            training.drain()

    run(recipe, loop)


def test_a_replica_that_steps_more_often_is_named_at_all() -> None:
    def loop(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
        train(rank, model, optimizer, 6 if rank else 20)
        training.drain()

    for error in ended(loop):
        assert isinstance(error, InputError) and "rank 1 drains and rank 0 goes on" in str(error)


@pytest.fixture
def ranks() -> Iterator[list[Mesh]]:
    with meshes(2) as found:
        yield found


def wider(model: nn.Module) -> None:
    model.into = nn.Linear(8, 17)


def narrower_dtype(model: nn.Module) -> None:
    model.out.half()


def untied(model: nn.Module) -> None:
    model.tied = nn.Linear(16, 8)


def other_values(model: nn.Module) -> None:
    with torch.no_grad():
        model.norm.bias.add_(1.0)  # type: ignore[union-attr,operator]


@pytest.mark.parametrize(
    "change, words",
    [
        (wider, r"into.bias is \[17\] float32 at rank 1, and \[16\] float32 here"),
        (narrower_dtype, "out.bias is .*float16 at rank 1"),
        (untied, "tied.bias"),
        (other_values, "norm.bias has other values at rank 1; start all replicas from the same weights"),
        (None, "rank 1 has the recipe .*; give all the same"),
    ],
)
def test_another_model_is_named_before_the_first_step(
    ranks: list[Mesh], change: Callable[[nn.Module], None] | None, words: str
) -> None:
    models = [Net(), Net()]
    if change:
        change(models[1])

    def begin(rank: int) -> str:
        recipe = "thinwire" if change or rank == 0 else "diloco"
        with pytest.raises(InputError) as e:
            local_steps(models[rank], adamw(list(models[rank].parameters())), recipe, peers=ranks[rank])
        return str(e.value)

    assert re.search(words, together([lambda r=r: begin(r) for r in range(2)])[0])


def test_what_cannot_be_exchanged_is_refused(ranks: list[Mesh]) -> None:
    model, peers = Net(), ranks[0]
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: local_steps(model, optimizer, "topk", peers=peers), "thinwire.replicate"),
        (lambda: local_steps(model, optimizer, peers={}), "nobody to train with"),
        (lambda: local_steps(model, [], peers=peers), "no optimiser"),
        (lambda: local_steps(nn.Linear(2, 2), optimizer, peers=peers), "the model does not have"),
        (lambda: local_steps(model, object(), peers=peers), "no torch optimiser"),  # type: ignore[arg-type]
        (lambda: local_steps(model.fixed, adamw(list(model.fixed.parameters())), peers=peers), "unfreeze"),
    ]
    for call, words in cases:
        with pytest.raises(InputError, match=words):
            call()


def ended(loop: Loop) -> list[ThinwireError]:
    """Return what ends a loop at each of two replicas."""
    models = [Net(), Net()]

    def replica(rank: int, peers: Mesh) -> ThinwireError:
        optimizer = adamw([p for p in models[rank].parameters() if p.requires_grad])
        options: dict[str, Any] = {"recipe": STRICT, "peers": peers, "deadline": 1.0}
        with local_steps(models[rank], optimizer, **options) as training:
            with pytest.raises(ThinwireError) as e:
                loop(rank, models[rank], optimizer, training)
            if "left" not in str(e.value):
                with pytest.raises(InputError, match="apart"):
                    training.drain()
            return e.value

    with meshes(2) as ranks:
        return together([lambda r=r: replica(r, ranks[r]) for r in range(2)])


def test_a_replica_with_nan_is_named_at_all() -> None:
    def loop(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
        for step in range(10):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            (loss * torch.nan if rank == 1 and step == 5 else loss).backward()
            optimizer.step()

    for error in ended(loop):
        assert isinstance(error, ReplicaNotFinite) and "rank 1" in str(error)


def test_a_replica_that_steps_no_more_is_named() -> None:
    def loop(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
        for step in range(10):
            if rank == 1 and step == 5:
                raise ThinwireError("it left")
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()

    error, _ = ended(loop)
    assert isinstance(error, LinkError) and "rank 1" in str(error)


def replaced(rank: int, model: nn.Module, optimizer: Any) -> None:
    adamw(list(model.parameters())).step()


def grown(rank: int, model: nn.Module, optimizer: Any) -> None:
    model.extra = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(model.extra.parameters())})


def frozen(rank: int, model: nn.Module, optimizer: Any) -> None:
    model.norm.requires_grad_(False)  # type: ignore[union-attr,operator]


def begun_twice(rank: int, model: nn.Module, optimizer: Any) -> None:
    local_steps(model, optimizer, peers={1 - rank: None})  # type: ignore[dict-item]


@each(
    "change, words",
    [
        (replaced, "another optimiser"),
        (grown, "extra.weight.* was added"),
        (frozen, "norm.weight.*frozen"),
        (begun_twice, "exchanged by another local_steps"),
    ],
)
def test_what_changes_underway_is_refused(change: Callable[..., None], words: str) -> None:
    seen: list[int] = []

    def loop(rank: int, model: nn.Module, optimizer: Any, training: SharedTraining) -> None:
        plain(rank, model, optimizer, training)
        training.drain()
        with pytest.raises(InputError, match=words):
            change(rank, model, optimizer)
            for step in range(4):
                loss_of(model, rank, step).backward()
                optimizer.step()
        seen.append(rank)
        raise ThinwireError("seen")

    with pytest.raises(ThinwireError, match="seen"):
        run(STRICT, loop)
    assert len(seen) == 2
