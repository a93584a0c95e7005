"""What goes wrong among members and their keeper: nobody waits for it, and nothing counts twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from thinwire.codecs import TopK
from thinwire.links.hub.hub import Hub
from thinwire.links.hub.spoke import Spoke
from thinwire.rounds.aggregation import Synchronous
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client import Client
from thinwire.rounds.client_profile import Assignment, ClientPace, ClientProfile, Situation
from thinwire.rounds.client_scheduler import MadeVersion
from thinwire.rounds.download import DeltaDownload
from thinwire.rounds.local_training import Samples
from thinwire.rounds.parameters import Parameters
from thinwire.rounds.remote import remote_server
from thinwire.rounds.remote.remote_client import RemoteClient
from thinwire.rounds.remote.remote_server import RemoteServer
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import Update, VersionForm, VersionMessage
from thinwire.types import ThinwireError
from thinwire.uses.following.run.gate import Gate

WIDE, CLASSES, PATIENCE = 200, 40, 20.0
NBYTES = 4 * (WIDE + 1) * CLASSES  # of the model


class Two:
    """Two local steps for each, and updates of few bytes."""

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        return [Assignment(2, TopK(0.05))] * len(devices)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(WIDE, CLASSES)


class Member(Client):
    """A member that notes the versions that it trained on, and takes its time."""

    def __init__(self, number: int, pause: Callable[[], object] = lambda: time.sleep(0.08)) -> None:
        x = torch.randn(30, WIDE, generator=torch.Generator().manual_seed(number))
        super().__init__(number, net(), Samples(x, x[:, :CLASSES].argmax(1), 10), ClientResiduals())
        self.versions, self.pause = list[VersionMessage](), pause

    def train(self, version: VersionMessage, start: torch.Tensor | None = None) -> Update:
        update = super().train(version, start)
        self.versions.append(version)
        self.pause()
        return update


class Keeper:
    """A host of rounds on a thread, whose rounds may last ``longest`` seconds."""

    def __init__(self, versions: int, longest: float = 5.0, server: Server | None = None) -> None:
        self.server = server or new_server()
        self.hub, self.notes, self.versions = Hub.bind(), list[str](), versions
        self.made, self.error = list[MadeVersion](), None
        self.host = RemoteServer(
            self.server,
            self.hub,
            {},
            self._told,
            gather=PATIENCE,
            deadline=PATIENCE,
            noted=self.notes.append,
            paced=lambda: longest,
            asked_again=1000,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _told(self, made: MadeVersion) -> bool:
        self.made.append(made)
        return made.number < self.versions

    def _run(self) -> None:
        try:
            self.host.run()
        except ThinwireError as e:
            self.error = e  # type: ignore[assignment]

    def end(self, versions: int = 1) -> None:
        """Let so many versions more be made, and wait for them."""
        self.versions = self.server.version + versions
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive() and self.error is None, (self.error, self.notes)
        self.hub.close()


def new_server() -> Server:
    return Server(Parameters(net()), Synchronous(), Two(), DeltaDownload(TopK(0.02)))


@contextmanager
def joined(port: int, *members: Member, patience: float = PATIENCE) -> Iterator[None]:
    """Let members take part, each on a thread."""
    spokes = [Spoke.connect("127.0.0.1", port) for _ in members]

    def take_part(spoke: Spoke, member: Member) -> None:
        remote = RemoteClient(spoke, patience, name=f"m{member.id}")
        remote.terms(member.id)
        remote.serve(member, ClientPace(0.01))

    pairs = zip(spokes, members, strict=True)
    threads = [threading.Thread(target=take_part, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(PATIENCE)
        for spoke in spokes:
            spoke.close()


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.002)


def session(keeper: Keeper, number: int) -> Any:
    until(lambda: number in keeper.host._sessions)
    return keeper.host._sessions[number]


def test_nobody_waits_for_the_model_of_a_newcomer_and_a_cut_fetches_it_no_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_server, "SIZE", 2000)
    keeper = Keeper(10_000)
    gate = Gate("127.0.0.1", keeper.hub.port, rate=30_000)
    old, new = Member(0), Member(1)
    with joined(keeper.hub.port, old):
        until(lambda: len(keeper.made) > 2)
        with joined(gate.port, new):
            coming = session(keeper, 1)
            until(lambda: coming.ahead is not None and coming.ahead._there > NBYTES / 2)
            began = keeper.server.version
            gate.shut()
            gate.open()
            until(lambda: new.versions)
            assert keeper.server.version > began + 5  # by the old one alone
            keeper.end(3)
    gate.close()
    assert new.versions[0].form is not VersionForm.WHOLE and new.versions[0].nbytes < NBYTES / 4
    assert keeper.server.traffic(1).down < 1.4 * NBYTES + sum(v.nbytes for v in new.versions)
    assert keeper.host.ended[0] == keeper.host.ended[1]  # the same bits
    assert keeper.made[-1].updates == 2
