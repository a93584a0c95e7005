"""Local steps by AdamW: torch's to the last bits, and moments that go on or do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from thinwire.codecs import Raw
from thinwire.rounds.client import Client
from thinwire.rounds.local_training import Samples, TrainingError
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import VersionForm, VersionMessage
from thinwire.types import InputError
from thinwire.uses.training.swarm.local_adamw import AdamWTurns, LocalAdamW

RATE, CLIP = 0.01, 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.unused = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(2, 2)
        self.b.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())  # type: ignore[no-any-return]


def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def batches(n: int, first: int = 0) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    made = [(torch.randn(4, 6, generator=draw), torch.randint(0, 3, (4,), generator=draw)) for _ in range(n)]
    return made[first:]


def by_torch(net: Net, lessons: list[tuple[Tensor, Tensor]], warmup: int = 0) -> None:
    trained = [p for p in net.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, RATE, (0.8, 0.95), 1e-6, 0.1, fused=False)
    for n, batch in enumerate(lessons, 1):
        optimiser.param_groups[0]["lr"] = RATE * min(1.0, n / (warmup + 1))
        optimiser.zero_grad()
        loss(net, batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimiser.step()


def run(turns: AdamWTurns, net: Net, lessons: list[tuple[Tensor, Tensor]], scale: float = 1.0) -> None:
    turns.run(net, loss, lessons, RATE, "member 3", scale)


def steep(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return a loss that is a number, whose slope is none."""
    weight = net.get_parameter("a.weight")
    return (weight - weight.detach()).abs().sum().sqrt()


def near(a: Net, b: Net) -> bool:
    return all(
        torch.allclose(p, q, rtol=1e-5, atol=1e-7)
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


@pytest.mark.parametrize(("moments", "warmup"), [("kept", 0), ("kept", 6), ("anew", 0), ("anew", 2)])
def test_turns_do_what_torch_does_and_go_on_from_a_state(moments: str, warmup: int) -> None:
    """Kept moments make turns one run; moments anew make each turn a run of its own."""
    spec = LocalAdamW(0.8, 0.95, 1e-6, weight_decay=0.1, clip=CLIP, moments=moments, warmup=warmup)
    net, theirs, turns = Net(), Net(), spec.open()
    run(turns, net, batches(5))
    saved = turns.state_dict()
    turns = spec.open()
    turns.load_state_dict(saved)
    run(turns, net, batches(9, first=5), scale=64.0)
    for part in [batches(9)] if moments == "kept" else [batches(5), batches(9, first=5)]:
        by_torch(theirs, part, warmup)
    assert near(net, theirs) and not near(net, Net())
    assert torch.equal(net.unused.weight, Net().unused.weight)


def test_a_turn_that_fails_names_itself_and_leaves_no_moments() -> None:
    turns = LocalAdamW().open()
    run(turns, Net(), batches(2))
    bad = [*batches(2), (torch.full((4, 6), torch.nan), torch.zeros(4, dtype=torch.int64))]
    with pytest.raises(TrainingError, match="member 3: training diverged at local step 3: nan is not finite"):
        run(turns, Net(), bad)
    assert not len(turns.state_dict()["steps"])
    with pytest.raises(TrainingError, match=r"member 3: training raised .*at local step 1"):
        run(turns, Net(), [(torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64))])

    with pytest.raises(TrainingError, match="diverged at local step 1"):
        turns.run(Net(), steep, batches(1), RATE, "member 3")
    run(turns, Net(), batches(1))
    with pytest.raises(InputError, match="moments of 5 parameters"):
        turns.run(nn.Linear(6, 3), loss, batches(1), RATE, "member 3")
    for wrong in ({"beta1": 1.0}, {"clip": -1.0}, {"eps": 0.0}, {"moments": "lost"}, {"warmup": -1}):
        with pytest.raises(InputError):
            LocalAdamW(**wrong)  # type: ignore[arg-type]


def test_a_client_trains_by_it() -> None:
    """The rate is the version's; two turns of 3 steps are one of 6 where moments are kept."""
    net, theirs = Net(), Net()
    x, y = (torch.cat(part) for part in zip(*batches(1), strict=True))
    spec = LocalAdamW(0.8, 0.95, 1e-6, weight_decay=0.1, clip=CLIP, warmup=0)
    client = Client(0, net, Samples(x, y, batch=0), ClientResiduals(), loss=loss, local=spec.open())
    for turn in (1, 2):
        start = torch.cat([p.detach().reshape(1, -1) for p in net.parameters() if p.requires_grad], 1)
        client.train(VersionMessage(turn, turn, 0, 0, VersionForm.FULL, (), 3, RATE, Raw()), start)
    by_torch(theirs, batches(1) * 6)
    assert near(net, theirs)
