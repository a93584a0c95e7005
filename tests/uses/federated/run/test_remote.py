"""Real sockets: hosts and guests come to the bits of one process, and go on after whatever breaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from visiting import guests

from thinwire.codecs import Codec, Raw, TopK, Uniform
from thinwire.links.hub.hub import Hub
from thinwire.links.hub.spoke import Spoke
from thinwire.links.hub.station import EventKind
from thinwire.rounds.aggregation import FedAsync, FedBuff, Periodic, Rule, Synchronous
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client import Client
from thinwire.rounds.client_profile import Assignment, ClientProfile, Situation
from thinwire.rounds.client_scheduler import MadeVersion
from thinwire.rounds.download import DeltaDownload, Download, FullDownload
from thinwire.rounds.journal import WitnessedServer, replay
from thinwire.rounds.local_training import Samples
from thinwire.rounds.parameters import Parameters
from thinwire.rounds.remote.client_handshake import PROBE_SIZE, PROBES
from thinwire.rounds.remote.control_messages import (
    PROTOCOL,
    WINDOW,
    MessagePiece,
    Receiving,
    Sending,
    Word,
    pack,
    values_of,
    whole,
)
from thinwire.rounds.remote.remote_client import SIZE as UP
from thinwire.rounds.remote.remote_client import RemoteClient
from thinwire.rounds.remote.remote_server import SIZE as DOWN
from thinwire.rounds.remote.remote_server import RemoteServer
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import Update, VersionMessage
from thinwire.types import InputError, LinkError, ThinwireError
from thinwire.uses.following.run.gate import Gate

WIDE, CLASSES, STEPS, CLIENTS, PATIENCE = 200, 40, 2, 3, 15.0


@dataclass(frozen=True)
class Same:
    codec: Codec = Raw()  # noqa: RUF009 -- frozen

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        return [Assignment(STEPS, self.codec)] * len(devices)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(WIDE, CLASSES)


def new_client(number: int) -> Client:
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(30, WIDE, generator=draw)
    return Client(number, net(), Samples(x, x[:, :CLASSES].argmax(1), 10), ClientResiduals())


@dataclass
class Federation:
    """A host in a thread, and what it says."""

    rule: Rule
    codec: Codec = field(default_factory=Raw)
    download: Download = field(default_factory=FullDownload)
    versions: int = 4
    expected: int = CLIENTS
    participate: int = 0
    deadline: float = PATIENCE
    quorum: float = 1.0
    made: list[MadeVersion] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: Exception | None = None

    def server(self, kind: type[Server] = Server) -> Any:
        return kind(Parameters(net()), self.rule, Same(self.codec), self.download)

    def __post_init__(self) -> None:
        self.running = self.server(WitnessedServer)
        self.hub = Hub.bind()
        self.host = RemoteServer(
            self.running,
            self.hub,
            {"values": self.running.weights.numel()},
            self._told,
            expected=self.expected,
            participate=self.participate,
            gather=PATIENCE,
            deadline=self.deadline,
            quorum=self.quorum,
            noted=self.notes.append,
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
            self.error = e

    def wait(self) -> None:
        self._thread.join(2 * PATIENCE)
        assert not self._thread.is_alive(), self.notes
        self.hub.close()

    def again(self) -> torch.Tensor:
        """Return the weights that the same turns make in this process."""
        server = self.server()
        replay(self.running.journal, server, {c: new_client(c) for c in range(10)})
        weights: torch.Tensor = server.weights
        return weights

    def refusals(self) -> list[str]:
        return [r.reason for _, r in self.host.tally.refused]


@pytest.mark.parametrize(
    ("rule", "codec", "download"),
    [
        (Synchronous(), Raw(), FullDownload()),
        (Synchronous(), TopK(0.05, Uniform(4, group=64)), DeltaDownload()),
        (FedBuff(2), TopK(0.05), FullDownload()),
        (FedAsync(), Raw(), FullDownload()),
        (Periodic(0.2), TopK(0.05, Uniform(4, group=64)), DeltaDownload(TopK(0.05))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_over_sockets_the_weights_are_those_of_one_process(
    rule: Rule, codec: Codec, download: Download
) -> None:
    federation = Federation(rule, codec, download)
    with guests(federation.hub.port, [new_client(c) for c in range(CLIENTS)]):
        federation.wait()
    assert federation.error is None
    assert len(federation.made) == 4
    assert torch.equal(federation.running.weights, federation.again())


def test_an_upload_that_was_cut_goes_on_from_where_it_was() -> None:
    federation = Federation(Synchronous(), versions=2, expected=1)
    gate = Gate("127.0.0.1", federation.hub.port, rate=40_000)
    whole = 4 * federation.running.weights.numel()
    with guests(gate.port, [new_client(0)]):
        await_true(lambda: (up := seat_of(federation).up) is not None and up.have > whole / 2)
        gate.shut()
        gate.open()
        federation.wait()
    gate.close()
    received = federation.hub.traffic()[1].nbytes
    assert received < 2.3 * whole + PROBES * PROBE_SIZE  # of one update, a third came twice at most
    assert torch.equal(federation.running.weights, federation.again())
    assert not federation.refusals()


def seat_of(federation: Federation, client: int = 0) -> Any:
    await_true(lambda: client in federation.host._sessions)
    return federation.host._sessions[client]


def await_true(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.002)


class Vanishing(Client):
    """A client whose process ends in its first turn."""

    def train(self, version: VersionMessage, start: torch.Tensor | None = None) -> Update:
        raise SystemExit


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_round_goes_on_without_a_client_that_vanished(returns: bool) -> None:
    federation = Federation(Synchronous(), TopK(0.1), deadline=1.5, versions=3)
    with guests(federation.hub.port, [new_client(0), new_client(1)]):
        with guests(federation.hub.port, [Vanishing(2, net(), new_client(2).data, ClientResiduals())]):
            seat_of(federation, 2)
            await_true(lambda: federation.made or bool(federation.host.tally.kept))
        if returns:
            with guests(federation.hub.port, [new_client(2)]):
                federation.wait()
        else:
            federation.wait()
    assert federation.error is None
    taken = [m.updates for m in federation.made]
    assert taken == [3, 3, 3] if returns else [2, 2, 2]
    assert federation.refusals() == ([] if returns else ["no update came within 1.5 s"])
    if not returns:
        assert torch.equal(federation.running.weights, federation.again())


class Silent(Client):
    """A client that is there, and takes far longer than the others."""

    def train(self, version: VersionMessage, start: torch.Tensor | None = None) -> Update:
        time.sleep(2.0)
        return super().train(version, start)


def test_a_quorum_gives_the_others_as_long_again() -> None:
    federation = Federation(Synchronous(), versions=4, quorum=0.6)
    began = time.monotonic()
    clients = [new_client(0), new_client(1), Silent(2, net(), new_client(2).data, ClientResiduals())]
    with guests(federation.hub.port, clients):
        federation.wait()
        took = time.monotonic() - began
    assert federation.error is None and took < PATIENCE
    assert [m.updates for m in federation.made].count(2) >= 3
    (reason, *_) = federation.refusals()
    assert "and 60% of the round had answered" in reason
    assert torch.equal(federation.running.weights, federation.again())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_nobody_answers_the_run_ends_and_names_the_clients() -> None:
    federation = Federation(Synchronous(), deadline=0.4, expected=1)
    with guests(federation.hub.port, [Vanishing(0, net(), new_client(0).data, ClientResiduals())]):
        seat_of(federation)
        time.sleep(0.3)
    federation.wait()
    assert isinstance(federation.error, LinkError)
    assert "of clients 0" in str(federation.error)


def test_a_late_client_takes_part_from_the_next_round() -> None:
    federation = Federation(Synchronous(), expected=1, versions=30)
    with guests(federation.hub.port, [new_client(0)]):
        await_true(lambda: len(federation.made) > 1)
        with guests(federation.hub.port, [new_client(5)]):
            federation.wait()
    assert federation.made[0].updates == 1
    assert federation.made[-1].updates == 2
    assert torch.equal(federation.running.weights, federation.again())


class Stranger:
    """Somebody who holds the token, if there is one, and says what it likes."""

    def __init__(self, federation: Federation) -> None:
        self._spoke = Spoke.connect("127.0.0.1", federation.hub.port)
        await_true(lambda: self._spoke.joined)

    def say(self, data: bytes) -> None:
        assert self._spoke.send(data)

    def hear(self, word: Word) -> bytes:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            event = self._spoke.recv(0.1)
            if event is not None and event.kind is EventKind.DATA and event.data[0] == word:
                return event.data
        raise AssertionError(f"no {word.name} came")

    def hello(self, number: int, **odd: Any) -> None:
        values = {
            "client": number,
            "samples": 10,
            "step_seconds": 0.1,
            "fixed": 0,
            "members": 1,
            "least": 1,
            "down": None,
            "delay": 0.01,
        }
        values |= {"fixed": 0, "members": 1, "least": 1, "delay": 0.01, "held": None}
        values |= {"after": 0, "trained": 0, "partial": 0, "have": 0} | odd
        self.say(pack(Word.HELLO, **values))

    def close(self) -> None:
        self._spoke.close()


def test_what_a_stranger_says_changes_nothing() -> None:
    federation = Federation(Synchronous(), versions=3)
    with guests(federation.hub.port, [new_client(0), new_client(1)]):
        seat_of(federation, 1)
        seat_of(federation, 0)
        stranger = Stranger(federation)
        stranger.say(pack(Word.ASK, protocol=PROTOCOL, client=0))
        assert b"client 0 is here already" in stranger.hear(Word.REFUSED)
        stranger.say(pack(Word.ASK, protocol=9))
        assert b"the server speaks protocol 4, not 9; update the server" in stranger.hear(Word.REFUSED)
        stranger.hello(0)
        assert b"client 0 is here already" in stranger.hear(Word.REFUSED)
        hostile = (b"", b"\xff\x00", b"\x04{", b"\x04[]", b"\x06short", b"\x03" * 4000, b"\x0d", b"\x0d{}")
        odd = [pack(Word.KIT, have=10**9), pack(Word.KIT, have=-1), pack(Word.HAVE, number=0, have=5)]
        for data in (*hostile, *odd, pack(Word.HELLO, client=-1), pack(Word.ASK, protocol="1")):
            stranger.say(data)
        with guests(federation.hub.port, [new_client(2)]):
            federation.wait()
        stranger.close()
    assert federation.error is None
    assert torch.equal(federation.running.weights, federation.again())


def test_a_client_that_sends_too_much_or_nonsense_is_refused_and_the_round_goes_on() -> None:
    federation = Federation(Synchronous(), versions=2, expected=2)
    stranger = Stranger(federation)
    stranger.hello(1)
    with guests(federation.hub.port, [new_client(0)]):
        for total, reason in ((10**9, b"an update of 1000000000 bytes"), (3, b"it was cut")):
            number = MessagePiece.unpack(stranger.hear(Word.PIECE)).number
            stranger.say(MessagePiece.FORM.pack(Word.PIECE, number, 0, total) + b"abc")
            assert reason in stranger.hear(Word.RECEIPT)
        stranger.close()
        federation.wait()
    assert [m.updates for m in federation.made] == [1, 1]
    assert len(federation.refusals()) == 2


def test_the_same_number_twice_is_refused_in_a_sentence() -> None:
    federation = Federation(Synchronous(), versions=2, expected=2)
    with guests(federation.hub.port, [new_client(0)]):
        seat_of(federation)
        spoke = Spoke.connect("127.0.0.1", federation.hub.port)
        with pytest.raises(InputError, match="client 0 is here already; give another number, or none"):
            RemoteClient(spoke, PATIENCE).terms(0)
        spoke.close()
        with guests(federation.hub.port, [new_client(1)]):
            federation.wait()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    data=st.binary(min_size=1, max_size=200),
    size=st.integers(1, 40),
    breaks=st.lists(st.integers(0, 8), max_size=6),
)
def test_a_message_arrives_whole_however_often_the_line_breaks(
    data: bytes, size: int, breaks: list[int]
) -> None:
    sending, receiving = Sending(3, data, size), Receiving(3, len(data))
    for many in [*breaks, 1000]:
        left = many

        def put(piece: bytes) -> bool:
            nonlocal left
            left -= 1
            if left >= 0:
                receiving.take(MessagePiece.unpack(piece))
            return left >= 0

        sending.send(put)
        sending.restart(receiving.have)
    assert (receiving.data, sending.done) == (data, True)


@pytest.mark.parametrize("size", [UP, DOWN])
@pytest.mark.parametrize("nbytes", [WINDOW, 2 * WINDOW + 1])
@pytest.mark.parametrize("full", [False, True])
def test_a_message_above_the_window_arrives_on_a_line_of_any_speed(
    nbytes: int, size: int, full: bool
) -> None:
    sending, receiving = Sending(3, bytes(nbytes), size), Receiving(3, nbytes)
    under_way, said = list[bytes](), list[bytes]()

    def put(answer: bytes) -> bool:
        said.append(answer)
        return not full or len(said) % 3 == 0  # the others find no room

    while not sending.done:
        sending.send(lambda piece: under_way.append(piece) is None)
        assert under_way, f"it stands at {receiving.have} of {nbytes} bytes"
        for piece in under_way:
            receiving.take(MessagePiece.unpack(piece), now=1.0)  # as on a line that takes no time
            many = len(said)
            receiving.acknowledge(1.0, put)
            if said[many:] and (not full or len(said) % 3 == 0):
                sending.heard(whole(values_of(said[-1]), "have"))
        under_way.clear()
        if receiving.have == nbytes:
            break
    assert len(said) < 40  # and not with each piece


def test_a_client_that_the_hub_lost_though_its_connection_lives_goes_on() -> None:
    federation = Federation(Synchronous(), versions=40, expected=2)
    with guests(federation.hub.port, [new_client(0), new_client(1)]):
        await_true(lambda: len(federation.made) > 1)
        federation.hub._lose(seat_of(federation).peer, b"it was stopped for a while")
        federation.wait()
    assert federation.error is None
    assert [m.updates for m in federation.made][-5:] == [2] * 5


def test_who_comes_without_a_number_takes_nobodys_place() -> None:
    federation = Federation(Synchronous(), versions=1, expected=3)
    away = Stranger(federation)
    away.hello(0)
    seat_of(federation)
    away.close()
    await_true(lambda: not seat_of(federation).there)
    spoke = Spoke.connect("127.0.0.1", federation.hub.port)
    assert RemoteClient(spoke, PATIENCE).terms()["client"] == 1
    spoke.close()
    with guests(federation.hub.port, [new_client(c) for c in range(3)]):
        federation.wait()


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"samples": 0}, b"client 2 has no samples"),
        ({"after": 2**62}, b"after is 4611686018427387904"),
        ({"step_seconds": 10**400}, b"step_seconds is 1000"),
        ({"client": 7}, b"one connection is one client"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_hello_that_makes_no_sense_is_answered_and_named(odd: dict[str, Any], told: bytes) -> None:
    federation = Federation(Synchronous(), versions=1, expected=2)
    stranger = Stranger(federation)
    if "client" in odd:
        stranger.hello(6)
        seat_of(federation, 6)
    stranger.hello(2, **odd)
    assert told in stranger.hear(Word.REFUSED)
    stranger.close()
    with guests(federation.hub.port, [new_client(0), new_client(1)]):
        federation.wait()
    assert federation.error is None
    assert told.decode() in federation.refusals()[0]


class Raising(Client):
    """A client whose data cannot be read."""

    def train(self, version: VersionMessage, start: torch.Tensor | None = None) -> Update:
        raise OSError("the disk " + "is gone " * 1000)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_client_whose_training_raises_is_named_at_once() -> None:
    federation = Federation(Synchronous(), versions=2, expected=2)
    began = time.monotonic()
    with guests(
        federation.hub.port, [new_client(0), Raising(1, net(), new_client(1).data, ClientResiduals())]
    ):
        federation.wait()
    assert time.monotonic() - began < 10
    assert federation.refusals()[0].startswith("the disk is gone")
    assert [m.updates for m in federation.made] == [1, 1]


def test_as_many_take_part_at_a_time_as_asked() -> None:
    federation = Federation(FedBuff(1), versions=8, participate=1)
    with guests(federation.hub.port, [new_client(c) for c in range(CLIENTS)]):
        federation.wait()
    turns = federation.host.tally.turns
    assert sum(turns.values()) == 8 and len(turns) > 1
    assert torch.equal(federation.running.weights, federation.again())
