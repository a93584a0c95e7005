"""What goes wrong among members and their keeper: nobody waits for it, and nothing counts twice."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from visiting import guests

from thinwire import swarm
from thinwire.codecs import Codec, Raw, TopK
from thinwire.files.checkpoint import read_checkpoint
from thinwire.links.hub.hub import Hub
from thinwire.links.hub.spoke import Spoke
from thinwire.replacing import replacing
from thinwire.rounds.aggregation import Synchronous
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client import Client
from thinwire.rounds.client_profile import Assignment, ClientPace, ClientProfile, Situation
from thinwire.rounds.client_scheduler import MadeVersion
from thinwire.rounds.download import DeltaDownload
from thinwire.rounds.local_training import Samples
from thinwire.rounds.parameters import Parameters, unpack_row
from thinwire.rounds.remote import remote_client, remote_server
from thinwire.rounds.remote.control_messages import PROTOCOL
from thinwire.rounds.remote.remote_client import RemoteClient
from thinwire.rounds.remote.remote_server import RemoteServer
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import Update, VersionForm, VersionMessage
from thinwire.runs.machine.files import REMEDY
from thinwire.runs.terminal.errors import guarded
from thinwire.types import InputError, LinkError, ThinwireError
from thinwire.uses.following.run.gate import Gate
from thinwire.uses.training.swarm.run import keeper_program
from thinwire.uses.training.swarm.run.keeper_program import STATE
from thinwire.uses.training.swarm.run.record import SwarmRecord

WIDE, CLASSES, PATIENCE = 200, 40, 20.0
NBYTES = 4 * (WIDE + 1) * CLASSES  # of the model


@dataclass(frozen=True)
class Two:
    """Two local steps for each, and updates by ``codec``."""

    codec: Codec = TopK(0.05)  # noqa: RUF009 -- frozen

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        return [Assignment(2, self.codec)] * len(devices)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(WIDE, CLASSES)


class Member(Client):
    """A member that notes versions, changes and updates, and takes its time before it answers."""

    def __init__(self, number: int, pause: Callable[[], object] = lambda: time.sleep(0.08)) -> None:
        x = torch.randn(30, WIDE, generator=torch.Generator().manual_seed(number))
        self.x, self.y = x, x[:, :CLASSES].argmax(1)
        super().__init__(number, net(), Samples(self.x, self.y, 10), ClientResiduals())
        self.versions, self.pause = list[VersionMessage](), pause
        self.changes, self.updates = list[torch.Tensor](), list[Update]()
        self.notes = list[str]()

    def change(self, version: VersionMessage, start: torch.Tensor) -> torch.Tensor:
        self.changes.append(super().change(version, start))
        return self.changes[-1]

    def train(self, version: VersionMessage, start: torch.Tensor | None = None) -> Update:
        self.updates.append(super().train(version, start))
        self.versions.append(version)
        self.pause()
        return self.updates[-1]

    def loss(self, row: torch.Tensor) -> float:
        model = net()
        Parameters(model).write(row)
        return float(nn.functional.cross_entropy(model(self.x), self.y).detach())


class Keeper:
    """A host of rounds on a thread, whose rounds may last ``longest`` seconds."""

    def __init__(
        self,
        versions: int,
        longest: float = 5.0,
        server: Server | None = None,
        expected: int = 1,
        port: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.server = server or new_server()
        self.hub, self.notes, self.versions = Hub.bind(port=port, clock=clock), list[str](), versions
        self.made, self.error = list[MadeVersion](), None
        self.state = self.server.state_dict()
        self.host = RemoteServer(
            self.server,
            self.hub,
            {},
            self._told,
            expected=expected,
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
        self.state = self.server.state_dict()  # as a keeper's file has it
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

    def kill(self) -> None:
        """End without a word to anybody, in the middle of whatever goes on."""
        self.host._conductor.going = False
        self.host._say_goodbye = lambda: None  # type: ignore[method-assign]
        self._thread.join(PATIENCE)
        self.hub.close(0.0)


def new_server(codec: Codec | None = None) -> Server:
    return Server(Parameters(net()), Synchronous(), Two(codec or TopK(0.05)), DeltaDownload(TopK(0.02)))


def joined(port: int, *members: Member) -> AbstractContextManager[object]:
    """Let members take part, each on a thread."""
    return guests(port, members, lambda spoke, m: RemoteClient(spoke, PATIENCE, m.notes.append, f"m{m.id}"))


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
            assert keeper.server.version > began  # by the old one alone
            keeper.end(3)
    gate.close()
    assert new.versions[0].form is not VersionForm.WHOLE and new.versions[0].nbytes < NBYTES / 4
    assert keeper.server.traffic(1).down < 1.4 * NBYTES + sum(v.nbytes for v in new.versions)
    assert keeper.host.ended[0] == keeper.host.ended[1]  # the same bits
    assert keeper.made[-1].updates == 2


def test_a_lone_member_that_is_killed_in_a_round_and_begins_anew_goes_on() -> None:
    keeper, held = Keeper(10_000), threading.Event()
    gate = Gate("127.0.0.1", keeper.hub.port)
    killed, anew = Member(0, pause=lambda: held.wait(PATIENCE)), Member(0)
    spoke = Spoke.connect("127.0.0.1", gate.port)

    def take_part() -> None:
        remote = RemoteClient(spoke, 1.0, killed.notes.append, "m0")
        with suppress(LinkError):
            remote.terms(0)
            remote.serve(killed, ClientPace(0.01))

    thread = threading.Thread(target=take_part, daemon=True)
    thread.start()
    until(lambda: killed.updates)  # which nobody will hear of
    gate.shut()
    until(lambda: not session(keeper, 0).there)
    with joined(keeper.hub.port, anew):
        until(lambda: len(anew.updates) > 1)
        keeper.end(2)
    held.set()
    thread.join(PATIENCE)
    spoke.close()
    gate.close()


def test_who_was_frozen_is_refused_kindly_and_brings_its_work_with_the_next_update() -> None:
    keeper, woken = Keeper(10_000, longest=0.3, server=new_server(Raw())), threading.Event()
    usual, frozen = Member(0), Member(1, pause=lambda: woken.wait(PATIENCE))
    with joined(keeper.hub.port, usual, frozen):
        until(lambda: session(keeper, 1).version is None and frozen.updates)  # it was given up
        stood = keeper.server.version
        until(lambda: keeper.server.version > stood + 3)
        woken.set()
        until(lambda: len(frozen.updates) > 1)
        until(lambda: keeper.server.traffic(1).updates)
        keeper.end(2)
    assert all("was refused: no update came within 0." in said for said in frozen.notes), frozen.notes
    assert keeper.server.traffic(1).refused == 0
    both = unpack_row(frozen.updates[1].packet, frozen.values, 1)
    assert torch.allclose(both, frozen.changes[0] + frozen.changes[1], atol=1e-6)
    assert keeper.host.ended[0] == keeper.host.ended[1]  # the same bits
    assert keeper.server.traffic(1).down < 2 * NBYTES + sum(v.nbytes for v in frozen.versions)


def test_a_keeper_that_was_killed_in_a_round_applies_nothing_twice_or_by_half() -> None:
    first, held = Keeper(10_000, server=new_server(Raw()), expected=2), threading.Event()
    quick, slow = Member(0), Member(1)
    with joined(first.hub.port, quick, slow):
        until(lambda: len(first.made) > 1)
        slow.pause = lambda: held.wait(PATIENCE)
        until(lambda: first.server.answers == (1, 2))  # one update is there, the other is not
        first.kill()
        again = new_server(Raw())
        again.resume(first.state)
        before, number = again.weights.clone(), again.version
        second = Keeper(10_000, server=again, expected=2, port=first.hub.port)
        held.set()
        until(lambda: second.made)
        after = again.weights if again.version == number + 1 else None
        second.end(2)
    assert after is not None
    answered = [next(u for u in m.updates[::-1] if u.version == number) for m in (quick, slow)]
    found = [unpack_row(u.packet, quick.values, u.client) for u in answered]
    assert torch.allclose(after, before - (found[0] + found[1]) / 2, atol=1e-6)
    # each brought what it had sent to the keeper that died, once
    for member, update in zip((quick, slow), found, strict=True):
        assert torch.allclose(update, member.changes[number] + member.changes[number + 1], atol=1e-5)
    assert second.host.ended[0] == second.host.ended[1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lone_survivor_goes_on_and_its_loss_falls() -> None:
    keeper, gone = Keeper(10_000, longest=0.5, expected=3), threading.Event()
    one, *others = Member(0), *(Member(i, pause=_vanish_once(gone)) for i in (1, 2))
    with joined(keeper.hub.port, one):
        with joined(keeper.hub.port, *others):
            until(lambda: len(keeper.made) > 1)
            gone.set()
        alone, before = keeper.server.version, one.loss(keeper.server.weights)
        until(lambda: keeper.server.version > alone + 8)
        keeper.end()
    assert [m.updates for m in keeper.made[-5:]] == [1] * 5
    assert one.loss(keeper.server.weights) < 0.95 * before


def _vanish_once(gone: threading.Event) -> Callable[[], object]:
    def pause() -> None:
        if gone.is_set():
            raise SystemExit  # the thread ends, as a process does

    return pause


def test_no_clock_of_a_member_matters() -> None:
    def weights(hours: float) -> torch.Tensor:
        keeper = Keeper(3, expected=2, clock=lambda: time.time() + 3600 * hours)
        with joined(keeper.hub.port, Member(0), Member(1)):
            keeper._thread.join(PATIENCE)
        keeper.end(0)
        return keeper.server.weights

    assert torch.equal(weights(0.0), weights(1.0))


def test_an_older_thinwire_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(1)
    monkeypatch.setattr(remote_client, "PROTOCOL", PROTOCOL - 1)
    spoke = Spoke.connect("127.0.0.1", keeper.hub.port)
    with pytest.raises(InputError, match=f"speaks protocol {PROTOCOL}, not 3; update the client"):
        RemoteClient(spoke, PATIENCE).terms()
    spoke.close()
    monkeypatch.undo()
    with joined(keeper.hub.port, Member(0)):
        keeper._thread.join(PATIENCE)
    keeper.hub.close()


def test_a_full_disk_ends_the_keeper_in_a_sentence_and_it_goes_on_from_the_last_good_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    write, port, listens = keeper_program.write_checkpoint, [0], threading.Event()

    def full(path: Path, state: Any, notes: Any) -> None:
        if int(state["download.numbers"][0]) > 2:
            with replacing(path):
                raise OSError(errno.ENOSPC, "No space left on device")
        write(path, state, notes)

    def keep(**options: Any) -> SwarmRecord:
        def told(found: int) -> None:
            port[0] = found
            listens.set()

        given = {
            "lr": 0.02,
            "local_steps": 2,
            "out": str(tmp_path),
            "rounds": 5,
            "eval_every": 0,
            "batch": 15,
        }
        return swarm.keep(net(), told, listen=f"127.0.0.1:{port[0]}", **given, **options)

    monkeypatch.setattr(keeper_program, "write_checkpoint", full)
    codes = list[int]()
    first = threading.Thread(target=lambda: codes.append(guarded(keep)), daemon=True)
    first.start()
    assert listens.wait(PATIENCE)
    member = Member(0)
    with joined(port[0], member):
        first.join(PATIENCE)
        assert codes == [2]
        said = capsys.readouterr().err.strip().splitlines()
        assert said == [f"thinwire: the disk is full: cannot write {tmp_path / STATE}; {REMEDY}"]
        assert int(read_checkpoint(tmp_path / STATE)["download.numbers"][0]) == 2
        assert [file.name for file in tmp_path.glob(".*")] == []
        monkeypatch.setattr(keeper_program, "write_checkpoint", write)
        record = keep(resume=True)
    assert record.status == "done" and record.totals["rounds"] == 5
