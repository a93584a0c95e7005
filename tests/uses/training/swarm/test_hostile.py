"""Twenty thousand hostile messages, to a keeper and to a member: refused in a sentence, and nothing grows."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from packets import resigned
from torch import nn

from thinwire.codecs import TopK
from thinwire.links.hub.station import Event, EventKind
from thinwire.rounds.aggregation import Synchronous
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client import Client
from thinwire.rounds.client_profile import Assignment, ClientPace, ClientProfile, Situation
from thinwire.rounds.client_scheduler import MANY
from thinwire.rounds.download import DeltaDownload
from thinwire.rounds.local_training import Samples, TrainingError
from thinwire.rounds.parameters import Parameters
from thinwire.rounds.remote.control_messages import (
    PROTOCOL,
    STATE,
    MessagePiece,
    Word,
    pack,
    pack_words,
    unpack_words,
    values_of,
    word_of,
)
from thinwire.rounds.remote.remote_client import RemoteClient
from thinwire.rounds.remote.remote_server import RemoteServer
from thinwire.rounds.residuals import ClientResiduals
from thinwire.types import InputError, PayloadError
from thinwire.uses.training.swarm.kit import pack_kit, unpack_kit
from thinwire.uses.training.swarm.run.member_program import SwarmTerms
from thinwire.uses.training.swarm.shares import Share, pack_share, read_share

EXTREMES = (
    None,
    -1,
    0,
    1,
    2,
    3,
    2**31,
    2**61,
    2**62,
    2**63,
    1e300,
    0.5,
    "x",
    "\x1b[2J" * 200,
    [],
    [0],
    {},
    True,
)
PEERS = [bytes([n]) * 16 for n in range(6)]
HONEST, FETCHING, STRANGE = PEERS[0], PEERS[1], PEERS[5]


class Line:
    """Both a hub and a spoke that lead nowhere: what is sent is kept."""

    peers, peer, heard, tried = tuple(PEERS), "a keeper", 0.0, ""
    clock: Any = type("NoClock", (), {"trip": 0.1})

    def __init__(self) -> None:
        self.sent = list[bytes]()

    def send(self, *data: bytes) -> bool:
        self.sent = [*self.sent[-50:], data[-1]]
        return True

    def recv(self, seconds: float) -> None:
        raise AssertionError("nobody waits here")

    def describe(self, peer: bytes) -> str:
        return "somebody"

    def close(self, linger: float = 0.0) -> None:
        """Nothing to close."""


class One:
    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        return [Assignment(1, TopK(0.5))] * len(devices)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(5, 2)


SIGNATURE = list(Parameters(net()).signature)


def client(number: int) -> Client:
    return Client(
        number, net(), Samples(torch.ones(4, 5), torch.zeros(4, dtype=torch.int64)), ClientResiduals()
    )


def hello(number: int, **changes: Any) -> dict[str, Any]:
    stands = {"held": None, "after": 0, "trained": 0, "partial": 0, "have": 0}
    pace = {
        "step_seconds": 0.1,
        "fixed": 0.0,
        "members": 1,
        "least": 1,
        "down": None,
        "delay": 0.01,
        "name": f"m{number}",
    }
    return {"client": number, "samples": 4, "signature": SIGNATURE, **pace, **stands, **changes}


def spoiled(random: Random, data: bytes) -> bytes:
    """Return hostile bytes: noise, or ``data`` cut, changed, grown or with an extreme in place of a value."""
    kind, out = random.randrange(7), bytearray(data)
    at = random.randrange(len(out))
    if kind == 0:
        return bytes([random.randrange(20)]) + random.randbytes(random.randrange(200))
    if kind == 1:
        del out[at:]
    elif kind == 2:
        out[at] ^= random.randrange(1, 256)
    elif kind == 3:
        out[at:at] = random.randbytes(random.randrange(1, 9))
    elif kind == 4:
        number = struct.pack("<Q", random.choice((0, 1, 2**31, STATE, 2**63, 2**64 - 1)))
        out[at : at + 8] = number[: len(out) - at]
    elif data[1:2] == b"{":
        values = json.loads(data[1:])
        for name in random.sample(sorted(values), min(len(values), random.randrange(3))):
            values[name] = random.choice(EXTREMES)
        return data[:1] + json.dumps(values).encode()
    return bytes(out)


def asked(number: int = 0) -> list[bytes]:
    """Return what a client says, one message of each word, as one that is honest would."""
    ask = pack(Word.ASK, protocol=PROTOCOL, client=None, name="x")
    held = [pack(Word.HAVE, number=n, have=h) for n, h in ((0, 5), (1, 9), (STATE, 90), (STATE, 10**9))]
    piece = MessagePiece.FORM.pack(Word.PIECE, 1, 0, 400) + bytes(100)
    said = [
        pack(Word.SPEED, step_seconds=0.1),
        pack(Word.FAILED, text="no"),
        pack(Word.DONE, number=0, check=1),
    ]
    whole = [pack(Word.HELLO, **hello(n)) for n in (number, 4, 4)]
    known = pack(Word.HELLO, **hello(number, held=[0, 7], partial=STATE, have=40, trained=1))
    others = [
        pack(Word.SHADOW, held=None),
        pack(Word.PAIR, been=None),
        pack(Word.KIT, have=3),
        bytes([Word.PROBE]) + bytes(300),
    ]
    return [ask, *held, piece, *said, *whole, known, *others]


def test_twelve_thousand_hostile_messages_to_a_keeper() -> None:
    server = Server(Parameters(net()), Synchronous(), One(), DeltaDownload(TopK(0.5)))
    line, notes = Line(), list[str]()
    host = RemoteServer(
        server,
        line,
        {},
        lambda made: True,
        deadline=1e6,
        noted=notes.append,
        paced=lambda: 1e6,
        kit=b"kit" * 9,
    )  # type: ignore[arg-type]
    host._hear(HONEST, pack(Word.HELLO, **hello(0, held=list(server.newest))), 0.0)
    host._hear(FETCHING, pack(Word.HELLO, **hello(1)), 0.0)
    host._began = 0.0
    host._conductor.start([0])  # a round that waits for the honest one, whatever others say
    before, random = server.weights, Random(3)
    corpus = asked()
    for case in range(12_000):
        peer = random.choice(PEERS[1:])
        host._handle(Event(EventKind.DATA, peer, spoiled(random, random.choice(corpus)), float(case)))
        if case % 40 == 0:
            host._handle(Event(EventKind.LOST, random.choice(PEERS[1:]), b"gone"))
        host._look_after()
    known = {c: session.there for c, session in host._sessions.items()}
    assert len(known) > 2 and len(notes) > 1000, (known, len(notes))  # some said what was to be answered
    assert server.weights is before and server.missing[0] == 0
    assert all(said.strip() and "\n" not in said and "\x1b" not in said for said in notes)
    assert len(host._handshake._promised) <= len(PEERS) and len(host._shadows.peers) <= len(PEERS)
    assert len(server.known) < 50
    for number in range(2 * MANY):
        host._hear(STRANGE, pack(Word.ASK, protocol=PROTOCOL, client=100 + number, name=f"n{number}"), 0.0)
        host._hear(STRANGE, pack(Word.HELLO, **hello(100 + number, samples=0)), 0.0)
    assert len(host.tally.refused) < 2 * MANY and len(host._handshake._promised) <= len(PEERS)
    update = client(0).train(server.issue(0, None, 1))
    host._sessions[0].version = None
    host._hear(HONEST, MessagePiece.FORM.pack(Word.PIECE, 0, 0, 1) + b"x", 0.0)  # of no turn
    assert server.missing[0] == 0
    assert server.receive(0, update.pack()).version == 1  # type: ignore[union-attr]


def test_five_thousand_hostile_messages_to_a_member() -> None:
    server = Server(Parameters(net()), Synchronous(), One(), DeltaDownload(TopK(0.5)))
    server.join(ClientProfile(0, 0.1, 4))
    server.begin([0])
    version, state = server.issue(0).pack(), server.lead(None).pack()

    def pieces(number: int, data: bytes) -> bytes:
        return MessagePiece.FORM.pack(Word.PIECE, number, 0, len(data)) + data

    plain = [pack(Word.WELCOME, number=1, have=0), pack(Word.HAVE, number=1, have=9), pack(Word.HELLO)]
    plain += [pack(Word.RECEIPT, number=1, reason="no"), pack(Word.REFUSED, text="go"), pack(Word.TERMS)]
    random, found = Random(4), Counter[str]()
    member, remote = client(0), RemoteClient(Line(), 1.0)  # type: ignore[arg-type]
    remote._client, remote._pace = member, ClientPace(0.1)  # type: ignore[attr-defined]
    for case in range(5_000):
        body = random.choice((version, state))
        if random.random() < 0.5:
            body = resigned(spoiled(random, body).ljust(8, b"\0"))
        number = case + 1 if random.random() < 0.5 else STATE + case
        data = random.choice((*plain, *[pieces(number, body[:3000])] * 4))
        data = spoiled(random, data) if random.random() < 0.4 else data
        try:
            remote._hear(word_of(data), data, float(case))
            found["taken"] += 1
        except (InputError, PayloadError, TrainingError) as e:
            found[type(e).__name__] += 1
            remote._again = 0
            assert str(e).strip() and "\n" not in str(e)
        assert remote._down is None or remote._down.have <= len(state) + len(version) + 10_000
    assert found["taken"] > 1000 and found["PayloadError"] > 300 and found["InputError"] > 50, found


def test_three_thousand_hostile_kits_shares_states_and_terms(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    share = pack_share(Share(torch.tensor([7, 3]), torch.randint(0, 90, (2, 9)), batch=1))
    terms = {
        "swarm": 1,
        "client": 0,
        "values": 9,
        "seq": 4,
        "batch": 2,
        "lora": 0,
        "seed": 1,
        "own_data": False,
    }
    terms |= {"weights": False, "weight_decay": 0.1, "grad_clip": 1.0, "kit": "a" * 32, "kit_nbytes": 9}
    readers: list[tuple[bytes, Callable[[bytes], object]]] = [
        (pack_kit(tmp_path / "model"), lambda data: unpack_kit(data, tmp_path / "kits" / "one")),
        (share, lambda data: read_share(data, 100)),
        (pack_words(json.dumps({"members": {}})), unpack_words),
        (b"\x02" + json.dumps(terms).encode(), lambda data: SwarmTerms.read(values_of(data))),
    ]
    random, found = Random(5), Counter[str]()
    for _ in range(3_000):
        data, read = random.choice(readers)
        data = spoiled(random, data)
        try:
            read(data)
            found["taken"] += 1
        except (InputError, PayloadError) as e:
            found["refused"] += 1
            assert str(e).strip() and "\n" not in str(e)
    assert found["refused"] > 1000, found
    assert [file.name for file in tmp_path.rglob("*") if file.suffix not in ("", ".json")] == []
