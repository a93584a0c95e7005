"""One client: what it computes depends on nothing around it, and what goes wrong is said at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federation import Federation, model, same, samples
from other_device import DEVICE, Elsewhere
from torch import Tensor, nn

from thinwire.channels.memory import Delta
from thinwire.codecs import Raw, TopK
from thinwire.rounds.client import Client
from thinwire.rounds.local_training import LocalSGD, Samples, TrainingError, classification
from thinwire.rounds.parameters import Parameters, unpack_row
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import VersionForm, VersionMessage
from thinwire.types import DesyncError, InputError


def issued(federation: Federation, client: int = 1) -> VersionMessage:
    """Return a version for a client that is asked alone."""
    federation.server.begin([client])
    return federation.server.issue(client)


def asked(steps: int, rate: float = 0.1) -> VersionMessage:
    return VersionMessage(1, 1, 0, 0, VersionForm.FULL, (), steps, rate, Raw())


def test_a_turn_depends_on_weights_seed_id_and_sequence_alone() -> None:
    def dropping(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(net(nn.functional.dropout(x, 0.5)), y)

    version = issued(Federation())
    found = []
    for seed, noise in ((0, 1), (0, 2), (7, 1)):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        client = Client(1, model(), samples(1), ClientResiduals(), loss=dropping, seed=seed)
        found.append(client.train(version).packet)
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1] != found[2]


def test_a_caller_that_has_the_values_need_not_decode_them() -> None:
    federation = Federation()
    version = issued(federation)
    known = federation.clients[1].train(version, start=federation.server.weights)
    assert known == Federation().clients[1].train(version)


def test_a_version_is_answered_once() -> None:
    federation = Federation(codec=TopK(0.1))
    client, old = federation.clients[1], issued(federation)
    newer = federation.server.issue(1)
    client.train(newer)
    before = federation.residuals.state_dict()
    for version in (old, newer):
        with pytest.raises(DesyncError, match="was made already, and 2 is the last; ask for another version"):
            client.train(version)
    after = federation.residuals.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in after)
    with pytest.raises(InputError, match="let it begin anew"):
        federation.server.issue(1, after=2**63)


def test_a_local_step_is_one_of_sgd() -> None:
    settings = LocalSGD(momentum=0.9, weight_decay=0.01, clip=0.1)
    version = issued(Federation(steps=3, batch=0))
    update = Client(1, model(), samples(1, 0), ClientResiduals(), local=settings).train(version)
    whole = model()
    start, data = Parameters(whole).read(), samples(1)
    optimiser = torch.optim.SGD(whole.parameters(), version.rate, 0.9, weight_decay=0.01)
    for _ in range(3):
        optimiser.zero_grad()
        classification(whole, (data.inputs, data.labels)).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        optimiser.step()
    change = start - Parameters(whole).read()
    torch.testing.assert_close(unpack_row(update.packet, change.numel(), 1), change, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            lambda x: x * torch.nan,
            "client 1, version 0: training diverged at local step 2: nan is not finite",
        ),
        (
            lambda x: x.missing,
            "client 1, version 0: training raised AttributeError: .*missing.* at local step 2",
        ),
    ],
)
def test_training_that_fails_says_so_at_once_and_loses_nothing(wrong: Any, text: str) -> None:
    federation = Federation(codec=TopK(0.1), steps=4)
    federation.round()
    client, steps = federation.clients[1], 0

    def failing(net: nn.Module, batch: Any) -> Tensor:
        nonlocal steps
        steps += 1
        loss = classification(net, batch)
        return wrong(loss) if steps == 2 else loss

    before = federation.residuals.state_dict()
    spoilt = Client(1, federation.shared, client.data, federation.residuals, loss=failing)
    with pytest.raises(TrainingError, match="version 1".join(text.split("version 0"))):
        spoilt.train(issued(federation))
    after = federation.residuals.state_dict()
    assert steps == 2 and all(name.startswith("sent.1.") for name in before.keys() - after.keys())
    assert all(torch.equal(before[name], after[name]) for name in after)  # that update was confirmed


def test_weights_that_diverge_in_the_last_step_are_not_sent() -> None:
    federation = Federation(steps=1)

    def steep(net: nn.Module, batch: Any) -> Tensor:
        return classification(net, batch) * 1e38 * 1e3

    client = Client(1, federation.shared, samples(1), federation.residuals, loss=steep)
    with pytest.raises(TrainingError, match="diverged at local step 1"):
        client.train(issued(federation))


def test_each_pass_takes_every_sample_once() -> None:
    data = Samples(torch.arange(10.0)[:, None], torch.zeros(10, dtype=torch.int64), batch=5)
    draw = torch.Generator().manual_seed(0)
    taken = [int(x) for inputs, _ in data.batches(4, draw) for x in inputs]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10)) and taken[:10] != taken[10:]
    assert [len(y) for _, y in Samples(data.inputs, data.labels, 30).batches(2, draw)] == [10, 10]


def test_impossible_clients_are_refused() -> None:
    for make, text in (
        (lambda: Parameters(nn.Flatten()), "no parameter to train"),
        (lambda: Parameters(nn.Linear(2, 1).half()), "weight is torch.float16; cast"),
        (lambda: Parameters(nn.BatchNorm1d(3)), "the model keeps running_mean"),
        (lambda: ClientResiduals(Delta()), "updates cannot go under Delta"),
        (lambda: ClientResiduals(references=TopK(0.1)), "references cannot be held"),
        (lambda: Samples(torch.zeros(0, 2), torch.zeros(0)), "0 inputs for 0 labels"),
        (lambda: Samples(torch.zeros(3, 2), torch.zeros(2)), "3 inputs for 2 labels"),
        (lambda: LocalSGD(momentum=1.0), "momentum=1.0 is not in"),
        (lambda: LocalSGD(clip=-1.0), "clip=-1.0 is below 0"),
    ):
        with pytest.raises(InputError, match=text):
            make()  # type: ignore[no-untyped-call]


def test_only_what_is_trained_crosses() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    parameters = Parameters(net)
    row = parameters.read()
    assert row.shape == (1, parameters.numel) == (1, 10)
    before = net[0].weight.clone()
    parameters.write(row + 1)
    assert same(parameters.read(), row + 1) and torch.equal(net[0].weight, before)


def test_a_client_that_will_not_come_back_is_forgotten() -> None:
    federation = Federation(codec=TopK(0.1))
    federation.round()
    federation.residuals.forget(2)
    assert not any(name.startswith(("sent.2.", "sender.2.")) for name in federation.residuals.state_dict())
    version = issued(federation, 2)
    change = unpack_row(federation.residuals.encode(2, 9, torch.ones(1, 52), Raw()), 52, 2)
    assert torch.equal(change, torch.ones(1, 52)) and version.confirmed == 1


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_turn_on_a_device_of_its_own_is_the_same_bits_and_waits_for_no_step(scale: float) -> None:
    """The row goes there and comes back; losses are looked at once, after the last step."""
    local = LocalSGD(momentum=0.5, clip=1.0)

    def change(net: nn.Module) -> Tensor:
        own = Client(0, net, samples(0), ClientResiduals(), seed=4, local=local, loss_scale=scale)
        return own.change(asked(5), torch.linspace(-1, 1, own.values)[None])

    wanted = change(model())
    with Elsewhere() as seen:
        net = model().to(DEVICE)
        seen.clear()
        found = change(net)
        kinds = [wait.partition(" at ")[0] for wait in seen.waits]
        assert found.device == DEVICE and torch.equal(found.cpu(), wanted)
    assert kinds.count("tolist") == 1 and seen.to_host == 1


def test_training_that_diverges_on_a_card_names_the_step() -> None:
    with Elsewhere():
        own = Client(0, model().to(DEVICE), samples(0), ClientResiduals())
        with pytest.raises(TrainingError, match="client 0, version 1: training diverged at local step 2: "):
            own.change(asked(20, rate=3e38), torch.ones(1, own.values))
