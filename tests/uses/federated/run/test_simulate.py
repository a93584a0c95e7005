"""The virtual clock: how long turns take, who waits for whom, and the same run in any number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from thinwire.codecs import Codec, Raw, TopK
from thinwire.links.profile import Profile
from thinwire.rounds.aggregation import FedAsync, FedBuff, Periodic, Rule, Synchronous
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client_profile import Assignment, ClientProfile, Situation
from thinwire.rounds.client_scheduler import MadeVersion
from thinwire.rounds.local_training import Decay
from thinwire.rounds.residuals import ClientResiduals
from thinwire.types import LinkError
from thinwire.uses.federated.run.datasets import Dataset
from thinwire.uses.federated.run.federated_setup import Setup
from thinwire.uses.federated.run.fleet import Availability, Fleet, VirtualDevice
from thinwire.uses.federated.run.options import FederatedConfig
from thinwire.uses.federated.run.simulation import Simulation
from thinwire.uses.federated.run.trainer import InProcessTrainer

STEPS = 5
CLIENTS = 4


@dataclass(frozen=True)
class Same:
    codec: Codec = Raw()  # noqa: RUF009 -- frozen

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        return [Assignment(STEPS, self.codec)] * len(devices)


def toy() -> Dataset:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 1, 4, 4, generator=draw)
    y = (x.mean((1, 2, 3)) > 0).long()
    return Dataset("toy", x, y, x, y, 2)


def simulated(
    devices: Sequence[VirtualDevice],
    rule: Rule,
    versions: int = 4,
    server: Profile | None = None,
    **more: object,
) -> tuple[Simulation, list[MadeVersion]]:
    config = FederatedConfig(model="logistic", split="iid", clients=len(devices), lr=0.1, devices="equal")
    setup = Setup.of(config, 0, toy())
    fleet = Fleet("test", tuple(devices), server)
    codec = more.pop("codec", Raw())
    host = Server(setup.weights, rule, Same(codec), rates=Decay(0.1))  # type: ignore[arg-type]
    for device in fleet.to_policy([len(part) for part in setup.parts]):
        host.join(device)
    made: list[MadeVersion] = []

    def told(version: MadeVersion) -> bool:
        made.append(version)
        return version.number < versions

    clients = setup.clients(ClientResiduals())
    simulation = Simulation(host, clients, fleet, InProcessTrainer(setup.compute), told, **more)  # type: ignore[arg-type]
    simulation.run()
    return simulation, made


def bytes_of(simulation: Simulation) -> tuple[float, float]:
    """Return the bytes of one download and one upload of client 0."""
    t = simulation.server.traffic(0)
    return t.down / t.updates, t.up / t.updates


def test_a_round_takes_as_long_as_its_slowest_client() -> None:
    link = Profile.parse("up=8kbit,down=16kbit,100ms")
    devices = [VirtualDevice(0.1 * (i + 1), link) for i in range(CLIENTS)]
    simulation, made = simulated(devices, Synchronous())
    down, up = bytes_of(simulation)
    turn = down / 2000 + 0.1 + STEPS * 0.1 * CLIENTS + up / 1000 + 0.1
    assert [m.at for m in made] == pytest.approx([turn * n for n in range(1, 5)])
    assert all(m.updates == CLIENTS and m.staleness == 0 for m in made)


def test_transfers_share_the_server_s_line() -> None:
    link = Profile.parse("1gbit")
    simulation, made = simulated(
        [VirtualDevice(0.1, link)] * CLIENTS, Synchronous(), 1, Profile.parse("8kbit")
    )
    down, up = bytes_of(simulation)
    assert made[0].at == pytest.approx(CLIENTS * (down + up) / 1000 + STEPS * 0.1, rel=0.01)


def test_free_downloads_take_no_time() -> None:
    devices = [VirtualDevice(0.1, Profile.parse("up=8kbit,down=16kbit,100ms"))] * CLIENTS
    simulation, made = simulated(devices, Synchronous(), free_down=True)
    _, up = bytes_of(simulation)
    assert made[0].at == pytest.approx(STEPS * 0.1 + up / 1000 + 0.1)
    assert simulation.server.traffic(0).down > 0


def test_a_period_takes_what_came_in_it() -> None:
    devices = [VirtualDevice(0.1), VirtualDevice(0.7)]  # turns of 0.5 and 3.5 s
    _, made = simulated(devices, Periodic(1.0), 5)
    assert [m.at for m in made] == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])
    assert [m.updates for m in made] == [1, 1, 1, 2, 1]
    assert made[3].staleness == 1.5  # three versions late, and none


def test_a_buffer_makes_a_version_when_it_is_full() -> None:
    devices = [VirtualDevice(0.1), VirtualDevice(0.2)]
    _, made = simulated(devices, FedBuff(3), 2)
    assert [m.at for m in made] == pytest.approx([1.0, 2.0])
    assert all(m.updates == 3 for m in made)


def test_the_same_seed_is_the_same_run_and_asynchronous_updates_count_late() -> None:
    devices = [VirtualDevice(0.1 * (i + 1), straggle=0.5, slower=3.0) for i in range(CLIENTS)]
    runs = [simulated(devices, FedAsync(), 8, codec=TopK(0.2)) for _ in range(2)]
    (first, made), (second, again) = runs
    assert torch.equal(first.server.weights, second.server.weights) and made == again
    assert any(m.staleness > 0 for m in made)


def test_rounds_draw_who_takes_part() -> None:
    simulation, made = simulated([VirtualDevice(0.1)] * 6, Synchronous(), 6, participate=2)
    assert all(m.updates == 2 for m in made)
    assert sum(simulation.server.traffic(c).updates for c in range(6)) == 12


def test_a_device_that_is_away_is_waited_for() -> None:
    away = VirtualDevice(0.1, available=Availability(((50.0, 100.0),), 100.0))
    _, made = simulated([away, away], Synchronous(), 1)
    assert made[0].at == pytest.approx(50.5)


def test_lost_updates_go_with_the_next_and_the_round_goes_on() -> None:
    devices = [VirtualDevice(0.1, drop_out=0.5), VirtualDevice(0.1)]
    simulation, made = simulated(devices, Synchronous(), 8)
    taken = [simulation.server.traffic(c).updates for c in range(2)]
    assert taken[1] == 8 > taken[0] > 0
    assert [m.updates for m in made].count(1) == 8 - taken[0]


def test_nobody_answers() -> None:
    with pytest.raises(LinkError, match=r"no update came in 2 rounds until .* of clients 0, 1; look"):
        simulated([VirtualDevice(0.1, drop_out=0.999999)] * 2, Synchronous())


def test_the_budget_ends_a_run() -> None:
    simulation, made = simulated([VirtualDevice(0.1)] * 2, Synchronous(), 100, budget=1.7)
    assert len(made) == 3 and simulation.now == 1.7
