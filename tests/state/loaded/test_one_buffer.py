"""A replica whose models have memory of their own keeps one buffer, until somebody looks at its tensors."""

import random
import tracemalloc
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from fused_model import FusedModel, checkpoint
from torch import Tensor, nn

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.replica import Replica
from thinwire.types import DesyncError


class Pair:
    """A publisher's history and a follower's replica, and what each of its models ought to have."""

    def __init__(self, seed: int) -> None:
        self.draw, self.tensors = random.Random(seed), checkpoint(seed)
        self.history = History(Layout.of(self.tensors))
        self.replica = Replica(self.history.layout)
        self.models: list[tuple[FusedModel, FusedModel]] = []  # each with one that its own loader fills
        self.publish()

    def publish(self) -> None:
        """Publish other values and bring them to the replica: by a patch, or now and then whole."""
        name = self.draw.choice(list(self.tensors))
        self.tensors = {n: x + (n == name or self.draw.random() < 0.1) for n, x in self.tensors.items()}
        base = 0 if self.draw.random() < 0.2 else self.replica.held.number
        self.history.publish(self.tensors)
        self.replica.apply(self.history.patch(base))

    def prepare(self) -> None:
        self.replica.prepare()

    def bring_up(self) -> None:
        """Use the newest version, in a further model too."""
        if len(self.models) < 3:
            rank = self.draw.randrange(2)
            self.models.append((FusedModel(rank), FusedModel(rank)))
            self.replica.fill(self.models[-1][0], self.models[-1][0].load_weights)
        self.replica.swap()
        assert self.replica.version == self.history.newest.number
        for _, expected in self.models:
            expected.load_weights(self.tensors.items())

    def let_go(self) -> None:
        """Drop a model, or replace the parameters of one and give it again."""
        if self.models and self.draw.random() < 0.5:
            self.models.pop(0)
        elif self.models:
            model = self.models[0][0]
            model.qkv = nn.Parameter(torch.zeros_like(model.qkv), requires_grad=False)
            assert not self.replica.fills(model)
            self.replica.fill(model, model.load_weights)
            self.bring_up()

    def look(self) -> None:
        """Look at the tensors: from then on there are two buffers."""
        if self.replica.held.number == self.replica.version:
            assert all(torch.equal(x, self.tensors[n]) for n, x in self.replica.tensors().items())

    def check(self) -> None:
        """Each model has the version of its last swap, whatever came since."""
        for model, expected in self.models:
            pairs = zip(model.parameters(), expected.parameters(), strict=True)
            assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("looks", [0, 0.05])
def test_whatever_comes_each_model_has_the_version_of_its_last_swap(
    looks: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.state.loaded.loaded_model.WHOLE_HERE", 0)  # only what changed is written
    for seed in range(4):
        pair = Pair(seed)
        steps: list[Callable[[], None]] = [pair.publish, pair.prepare, pair.bring_up, pair.let_go, pair.look]
        for _ in range(30):
            pair.draw.choices(steps, [4, 2, 3, 1, 9 * looks])[0]()
            pair.check()


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_the_state_is_held_once_more_only_once_somebody_looks() -> None:
    def change(step: int) -> None:
        tensors["w"][step::100] += 1
        history.publish(tensors)
        replica.apply(history.patch(history.newest.number - 1))
        replica.prepare()

    tensors = {"w": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    model, history = nn.Linear(1 << 10, 1 << 10, bias=False).bfloat16(), History(Layout.of(tensors))

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, x in weights:
            model.weight.data.copy_(x.view(model.weight.shape))

    history.publish(tensors)
    replica = Replica(history.layout)
    replica.apply(history.patch(0))
    for step in range(4):
        replica.fill(model, load) if not step else replica.swap()
        change(step)
    held = []
    for look in (False, True):
        if look:
            replica.tensors()
        change(7 + look)
        held.append(tracemalloc.get_traced_memory()[0] / history.layout.nbytes)
    assert 0.9 < held[1] - held[0] < 1.2, held
    assert torch.equal(model.weight.view(-1), replica.tensors()["w"])


def test_a_write_that_breaks_off_is_not_used_and_all_comes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(0)
    pair.bring_up()
    pair.publish()
    pair.bring_up()
    pair.tensors = {n: x + 1 for n, x in pair.tensors.items()}
    base = pair.history.newest.number
    pair.history.publish(pair.tensors)

    def fails(*of: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr("thinwire.state.patches.moves.write", fails)
        pair.replica.apply(pair.history.patch(base))
    assert not pair.replica.swap()
    pair.check()
    with pytest.raises(DesyncError):
        pair.replica.apply(pair.history.patch(base))
    pair.replica.apply(pair.history.patch(0))
    pair.bring_up()
    pair.check()
