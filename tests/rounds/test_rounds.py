"""Client and server together: what is learned, that nothing is lost or counted twice, and going on later."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise, permutations
from random import Random

import pytest
import torch
from federation import RATE, SIZES, Federation, Same, kept, model, refused, same, samples, taken
from other_device import DEVICE, Elsewhere, Seen
from torch import Tensor, nn

from thinwire.channels.disk import DiskStore
from thinwire.channels.memory import NoMemory
from thinwire.channels.references import References
from thinwire.codecs import Cast, Codec, Entropy, HardThreshold, Raw, TopK, Uniform
from thinwire.rounds.aggregation import FedAsync, FedBuff, Periodic, Rule, Synchronous, summed
from thinwire.rounds.aggregation_server import Accepted
from thinwire.rounds.client_profile import Assignment, ClientProfile, Situation
from thinwire.rounds.client_scheduler import ClientScheduler
from thinwire.rounds.download import DeltaDownload, FullDownload
from thinwire.rounds.parameters import Parameters, unpack_row
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import Update
from thinwire.types import InputError, ThinwireError

RULES: list[Rule] = [Synchronous(), Synchronous("participants"), FedAsync(), FedBuff(3), Periodic(a=0.5)]
SPARSE = TopK(0.1, Uniform(4, group=16))
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = [pytest.param(DEVICE, id="make-believe"), pytest.param(torch.device("cuda"), id="cuda", marks=CUDA)]


def test_one_step_of_each_client_is_one_step_on_all_their_samples() -> None:
    federation = Federation(steps=1, batch=0)
    federation.round()
    whole, parts = model(), [samples(i) for i in range(len(SIZES))]
    x, y = torch.cat([p.inputs for p in parts]), torch.cat([p.labels for p in parts])
    nn.functional.cross_entropy(whole(x), y).backward()
    torch.optim.SGD(whole.parameters(), RATE).step()
    torch.testing.assert_close(federation.server.weights, Parameters(whole).read(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "download", [FullDownload(), FullDownload(Cast("bfloat16")), DeltaDownload(SPARSE)], ids=str
)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_learns_by_every_download(rule: Rule, download: FullDownload | DeltaDownload) -> None:
    federation = Federation(rule, download=download, codec=SPARSE)

    @torch.no_grad()
    def loss() -> float:
        Parameters(federation.shared).write(federation.server.weights)
        parts = [samples(i) for i in federation.clients]
        found = [nn.functional.cross_entropy(federation.shared(p.inputs), p.labels) for p in parts]
        return float(sum(found)) / len(found)

    before = loss()
    for _ in range(8):
        federation.round()
    assert loss() < 0.9 * before
    traffic = federation.server.traffic(1)
    assert (traffic.updates, traffic.refused) == (8, 0)
    assert traffic.raw_up == traffic.raw_down == 8 * 4 * federation.server.weights.numel()


class Noted(ClientResiduals):
    """ClientResiduals that note what clients computed."""

    computed: defaultdict[int, Tensor]

    def encode(self, client: int, sequence: int, change: Tensor, codec: Codec) -> bytes:
        self.computed[client] = self.computed[client] + change.double()
        return super().encode(client, sequence, change, codec)

    def undelivered(self, client: int, references: Codec) -> Tensor:
        """Return what is kept for a client: the residual, and the update under way or lost."""
        held, total = References(references), torch.zeros(1, dtype=torch.float64)
        state = self.state_dict()
        held.take(
            {n.removeprefix("sender."): x for n, x in state.items() if n.startswith(f"sender.{client}.")}
        )
        total = total + held.load([client]).double()
        for name, x in state.items():
            if name.startswith(f"sent.{client}."):
                total = total + unpack_row(x.numpy().tobytes(), total.numel(), client).double()
        return total


@pytest.mark.parametrize(
    ("codec", "references", "error"),
    [
        (SPARSE, Raw(), 1e-5),
        (HardThreshold(0.05), Raw(), 1e-5),
        (Entropy(Uniform(2, group=16)), Raw(), 1e-5),
        (SPARSE, Cast("float16"), 1e-2),
        (SPARSE, Uniform(8, group=16), 0.1),
    ],
    ids=str,
)
def test_what_was_computed_is_applied_once_or_still_to_be_sent(
    codec: Codec, references: Codec, error: float
) -> None:
    """Whatever is lost, late, sent twice or refused on the way."""
    residuals, random = Noted(references=references), Random(5)
    residuals.computed = defaultdict(lambda: torch.zeros(1, dtype=torch.float64))
    federation = Federation(FedBuff(1, a=0.0), codec=codec, residuals=residuals)
    server, first = federation.server, federation.server.weights
    applied: defaultdict[int, Tensor] = defaultdict(lambda: torch.zeros(1, dtype=torch.float64))
    under_way: list[tuple[int, bytes]] = []
    outcomes: defaultdict[str, int] = defaultdict(int)
    for _ in range(100):
        client = random.randrange(len(SIZES))
        if random.random() < 0.2:
            server.issue(client)  # and it never arrives
        under_way.append((client, federation.update(client)))
        late = random.sample(under_way, random.randrange(min(3, len(under_way))))
        for i, data in [*late, *under_way[-1:][: random.randrange(3)]]:
            answer = server.receive(i, data)
            outcomes[type(answer).__name__] += 1
            if isinstance(answer, Accepted):
                row = unpack_row(Update.unpack(data).packet, first.numel(), i)
                applied[i] = applied[i] + row.double()
    assert min(outcomes.values()) > 15, outcomes
    moved = sum(applied.values())
    torch.testing.assert_close(server.weights.double(), first.double() - moved, atol=1e-4, rtol=0)
    for i in federation.clients:
        residuals.settle(i, server.issue(i).confirmed)
        found = applied[i] + residuals.undelivered(i, references)
        torch.testing.assert_close(found, residuals.computed[i], atol=error, rtol=0)


def test_without_a_memory_nothing_is_kept() -> None:
    federation = Federation(codec=SPARSE, residuals=ClientResiduals(NoMemory()))
    federation.round()
    assert federation.residuals.sent == 0
    assert all(x.numel() == 0 for x in federation.residuals.state_dict().values())


@pytest.mark.parametrize("rule", [Synchronous(), FedBuff(len(SIZES)), Periodic()], ids=str)
def test_the_order_of_arrival_does_not_change_bits(rule: Rule) -> None:
    found = []
    for order in list(permutations(range(len(SIZES))))[::5]:
        federation = Federation(rule, codec=Uniform(3, group=8))
        for _ in range(2):
            federation.round(order)
        found.append(federation.server.weights)
    assert all(same(f, found[0]) for f in found) and len(found) > 3


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_server_goes_on_from_its_state_bit_for_bit(rule: Rule) -> None:
    """Also in the middle of a round, with updates that wait and clients that train."""

    def federation() -> Federation:
        return Federation(rule, codec=SPARSE, download=DeltaDownload(SPARSE))

    def half(one: Federation) -> dict[int, bytes]:
        one.round()
        one.round()
        if rule.in_rounds:
            one.server.begin(one.clients)
        updates = {i: one.update(i) for i in one.clients}
        taken(one.server.receive(2, updates.pop(2)))
        return updates

    def rest(one: Federation, updates: dict[int, bytes]) -> Tensor:
        for i, data in updates.items():
            taken(one.server.receive(i, data))
        one.server.close()
        one.round()
        return one.server.weights

    stays, stops = federation(), federation()
    updates = half(stays)
    half(stops)
    again = federation()
    again.server.load_state_dict(stops.server.state_dict())
    again.residuals.load_state_dict(stops.residuals.state_dict())
    assert kept(again.server) == kept(stays.server)
    for i, client in stops.clients.items():  # clients live on
        again.clients[i] = client
        client.residuals = again.residuals
    assert same(rest(again, updates), rest(stays, updates))
    assert kept(again.server) == kept(stays.server)
    with pytest.raises(ThinwireError, match="this server is one of"):
        Federation(FedBuff(77)).server.load_state_dict(stops.server.state_dict())


def test_residuals_on_disk_are_those_in_memory() -> None:
    store = DiskStore(memory=300)
    found = []
    for residuals in (ClientResiduals(), ClientResiduals(store=store)):
        federation = Federation(codec=SPARSE, residuals=residuals)
        for _ in range(4):
            federation.round()
        found.append(federation.server.weights)
    assert same(*found) and store.resident <= 300
    store.close()


@pytest.mark.parametrize(
    ("references", "most"), [(Raw(), 4.0), (Cast("float16"), 2.0), (Uniform(8, group=16), 1.2)]
)
def test_residuals_take_what_their_form_takes(references: Codec, most: float) -> None:
    federation = Federation(codec=SPARSE, residuals=ClientResiduals(references=references))
    federation.round()
    state = federation.residuals.state_dict()
    for i in federation.clients:
        nbytes = sum(
            x.nbytes for name, x in state.items() if name.startswith(f"sender.{i}.") and name[-1] != "e"
        )
        assert nbytes <= most * federation.server.weights.numel()


@pytest.mark.parametrize("rule", [Synchronous(), FedAsync(), Periodic()], ids=str)
def test_nothing_grows_by_round(rule: Rule) -> None:
    federation = Federation(rule, codec=SPARSE, download=DeltaDownload(SPARSE))

    def count() -> tuple[int, int, int]:
        gc.collect()
        tensors = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
        return tensors, len(federation.server.state_dict()), len(federation.residuals.state_dict())

    for _ in range(2):
        federation.round()
    before = count()
    for _ in range(6):
        federation.round()
    assert count() == before


def test_a_round_goes_on_without_those_who_do_not_answer() -> None:
    federation = Federation(Synchronous("participants"))
    server = federation.server
    server.begin([0, 1, 2])
    updates = {i: federation.update(i) for i in (0, 1, 2)}
    taken(server.receive(0, updates[0]))
    assert server.missing == [1, 2] and server.give_up(1) is None
    refused(server.receive(1, updates[1]), "nobody waits for it")
    assert server.leave(2) == 1 and server.clients == [0, 1, 3]
    refused(server.receive(1, updates[1]), "late: the round of version 0 is over")
    server.begin([1])
    assert server.close() is None and server.version == 1  # nobody answered
    server.begin([1])
    federation.update(1)
    assert federation.policy.asked == [0, 1]  # once a version, and one device fewer


@dataclass
class Listening(Same):
    """Note the norms that it is told."""

    norms: tuple[float, ...] = ()

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> list[Assignment]:
        self.norms = situation.norms
        return super().assign(devices, situation)


def test_a_policy_is_told_how_far_each_version_went() -> None:
    federation, rows = Federation(), []
    federation.server.policy = policy = Listening()
    for _ in range(4):
        rows.append(federation.server.weights)
        federation.round()
    assert policy.norms == pytest.approx([float((b - a).norm()) for a, b in pairwise(rows)])
    again, other = Federation(), Listening()
    again.server.load_state_dict(federation.server.state_dict())
    again.server.policy = other
    again.server.assignments()
    assert other.norms[:3] == policy.norms and len(other.norms) == 4


@pytest.mark.parametrize("download", [FullDownload(), DeltaDownload(SPARSE)], ids=str)
def test_versions_may_be_made_elsewhere(download: FullDownload | DeltaDownload) -> None:
    """By whoever collects the updates: the same bits as by the rule, where the sum is the same."""
    own, other = (Federation(Periodic(weights="equal"), codec=SPARSE, download=download) for _ in range(2))
    for number in range(1, 4):
        own.round()
        for i in other.clients:
            taken(other.server.receive(i, other.update(i)))
        changes = other.server.collect()
        assert list(changes) == [0, 1, 2, 3] and other.server.waiting == 0
        weights = other.server.weights.double()
        weights = (weights - summed(weights, [(0.25, change) for change in changes.values()])).float()
        assert other.server.adopt(weights) == other.server.version == number
        assert same(other.server.weights, own.server.weights)
        assert same(other.server.given, own.server.given)
    for wrong, words in ((weights[:, 1:], "values for a model"), (weights * float("nan"), "not be finite")):
        with pytest.raises(InputError, match=words):
            other.server.adopt(wrong)
    assert other.server.version == 3


def test_a_round_is_over_those_who_were_there_as_it_began() -> None:
    """Who leaves, comes or says something else in the midst of it changes nothing of n, S and assignments."""
    shares, sizes = [], []
    for unrest in (False, True):
        federation = Federation(Synchronous("participants"))
        server = federation.server
        server.begin([0, 1, 2])
        updates = {c: federation.update(c) for c in (0, 1)}
        before = server.assignments()
        if unrest:
            server.leave(3)
            server.join(ClientProfile(7, 0.1, 1000))
            server.leave(2)
            server.join(ClientProfile(1, 0.1, server.device(1).samples + 50))
            copy = Federation(Synchronous("participants")).server
            copy.load_state_dict(server.state_dict())
            federation.server = server = copy
            assert {c: server.assignments()[c] for c in before} == before
        else:
            server.give_up(2)
        for client, update in updates.items():
            taken(server.receive(client, update))
        shares.append(server.weights)
        sizes.append(server.version)
    assert sizes == [1, 1] and same(*shares)


def test_who_does_not_answer_in_time_is_left_out_for_longer_each_time() -> None:
    federation, asked = Federation(Synchronous()), []
    server = federation.server

    def begin(client: int) -> None:
        if client == 3:
            asked.append(server.version)
        else:
            updates[client] = federation.update(client)

    updates: dict[int, bytes] = {}
    conductor = ClientScheduler(
        server, lambda: server.clients, begin, lambda made: made.number < 40, lambda: 0.0
    )
    conductor.start(federation.clients)
    while conductor.going:
        for client, update in list(updates.items()):
            del updates[client]
            conductor.came(client, server.receive(client, update))
        if conductor.going and server.missing == [3]:
            conductor.late(3)
    assert asked == [0, 2, 6, 14, 30]


@pytest.mark.parametrize("rule", [Synchronous(), FedAsync()], ids=str)
@pytest.mark.parametrize("download", [FullDownload(), DeltaDownload(SPARSE)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_clients_and_a_server_there_end_as_a_server_here_does(
    device: torch.device, download: FullDownload | DeltaDownload, rule: Rule
) -> None:
    """Both servers are sent what clients on the device made; each message crosses in one copy.

    A client waits for it, for the losses and their sum; whoever decodes, for whether it does and is sound.
    """
    with Elsewhere() if device == DEVICE else nullcontext(Seen()) as seen:
        here = Federation(rule, download=download, codec=SPARSE)
        there = Federation(rule, download=download, codec=SPARSE, device=device, serves=True)
        for _ in range(3):
            if rule.in_rounds:
                here.server.begin(here.clients)
                there.server.begin(there.clients)
            for i, client in there.clients.items():
                asks = i, client.held, client.sequence
                version = there.server.issue(*asks)
                assert version.packets == here.server.issue(*asks).packets
                seen.clear()
                update = client.train(version).pack()
                assert seen.to_host <= 2 and len(seen.waits) <= 4, seen
                taken(here.server.receive(i, update))
                seen.clear()
                taken(there.server.receive(i, update))
                assert not there.server.waiting or (seen.to_device <= 1 and len(seen.waits) <= 2), seen
        saved = there.server.state_dict()
        there.server.load_state_dict(saved)
        ends = [kept(federation.server) for federation in (here, there)]
        assert all(x.device.type == "cpu" for x in (*saved.values(), *there.residuals.state_dict().values()))
    for end in ends:
        del end["words"]["model"]  # a server of a row alone knows none
    assert ends[0] == ends[1]
