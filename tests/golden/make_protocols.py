"""Write the golden bytes of protocols that are missing: run ``python tests/golden/make_protocols.py``.

A name that is there is never written anew: a change of what two machines say to each other, or of what lies
on a disk, needs a new version of it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from thinwire.codecs import TopK
from thinwire.files import safetensors
from thinwire.links import security
from thinwire.links.hub import station
from thinwire.links.pair import segment
from thinwire.links.relay import handshake
from thinwire.rounds.remote.control_messages import Sending
from thinwire.rounds.update_messages import Update, VersionForm, VersionMessage
from thinwire.state.devices.resident import filled
from thinwire.state.disk import saved
from thinwire.state.layout import Layout
from thinwire.state.patches.patch import Version
from thinwire.state.words import Words
from thinwire.uses.following.pull import manifest
from thinwire.uses.following.pull.manifest import File, Manifest, Proof, StoredVersion
from thinwire.uses.following.push import protocol
from thinwire.uses.pictures.rank_message import RankMessage as Passed
from thinwire.uses.training.replicas.controller import ExchangeMessage as Exchanged
from thinwire.uses.training.replicas.controller import Measurement

FILE = Path(__file__).parent / "protocols" / "bytes.json"
TOKEN = b"a long random text"
ONE, TWO = bytes(range(16)), bytes(range(16, 32))
MESSAGES = (
    protocol.Hello(protocol.MAGIC, protocol.PROTOCOL, 1, ONE, TWO, 2, 3, 4, 5, 6, 7, 8),
    protocol.Ack(1, 1 << 40),
    protocol.Done(1, 2, 3, 1 << 63),
    protocol.Again(1, 2, 3, 4),
    protocol.LayoutIs(protocol.PROTOCOL, 1, ONE, TWO, 2, b"name".ljust(protocol.MAX_NAME, b"\0"), b"{}"),
    protocol.Begin(1, 2, 3, 4, 5, 6),
    protocol.Chunk(1, 2, b"data"),
    protocol.End(1, 2, b"head"),
    protocol.Abandon(1, 2),
    protocol.Same(1, 2, 0.5, b"{}"),
    protocol.Ask(protocol.PROTOCOL),
    protocol.Quiet(1.5),
)
REQUEST = handshake.Request(handshake.Role.DIAL, bytes(range(32)), ONE, TWO)
MATCHED = handshake.Answer(handshake.Verdict.MATCHED, TWO)
HELLO = handshake.MAGIC + bytes(32)
SHELF = Manifest(
    name="state",
    instance="0123456789abcdef",
    written=1e9,
    lease=30.0,
    digest="ab",
    layout=File(manifest.LAYOUT, 0, 0, 2, "0" * 64),
    versions=(StoredVersion(1, 2, 0.5), StoredVersion(2, 3, 1.5)),
    files=(File("patches/00000001-00000002-0123abcd.safetensors", 1, 2, 9, "f" * 64),),
    meta={"step": 3},
)


def pieces() -> bytes:
    found = list[bytes]()
    Sending(1, b"body", 3).send(lambda piece: found.append(piece) is None)
    return b"".join(found)


def state() -> tuple[Words, Version]:
    tensors = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(3).bfloat16()}
    words, _ = filled(Layout.of(tensors), list(tensors.values()))
    return words, Version(7, words.hash(), 0.5, {"step": 3})


def saved_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        saved.save(Path(folder, "state"), *state())
        return Path(folder, "state").read_bytes()


def golden() -> dict[str, str]:
    """Return what each of them is in bytes, as hexadecimal digits."""
    key = handshake.access_key(TOKEN)
    asking = handshake.ask(key, HELLO, bytes(range(32)), REQUEST)
    made = {f"sync {type(m).__name__}": m.pack() for m in MESSAGES}
    made |= {
        "exchange of replicas": Exchanged(
            1, 2, Measurement(0.5, 1.5, 2.5, 3.5), [b"one", b""], False, True
        ).pack(),
        "exchange of pictures": Passed(1 << 63, 1 << 31, [b"one", b""]).pack(),
        "federated update": Update(1, 2, 3, 4, 5, b"packet").pack(),
        "federated version": VersionMessage(
            1, 2, 3, 4, VersionForm.MISSED, (b"one", b""), 5, 0.5, TopK(0.5), 6
        ).pack(),
        "federated pieces": pieces(),
        "relay 2 asking": asking,
        "relay 2 answer": handshake.answer(key, HELLO, asking, MATCHED),
        "relay 2 refusal": handshake.answer(key, HELLO, asking, handshake.Answer(handshake.Verdict.REFUSED)),
        "relay pass": handshake.relay_pass(TOKEN).encode(),
        "relay pair": handshake.pair_name(TOKEN, "run", 0, 1),
        "tunnel words": handshake.PING + handshake.PONG + handshake.CALL + handshake.GO + handshake.BUSY,
        "shelf manifest": SHELF.pack(Proof(None)),
        "shelf manifest, signed": SHELF.pack(Proof(TOKEN)),
        "shelf file": safetensors.wrap(b"body", {"thinwire.version": "1"}),
        "saved state": saved_bytes(),
        "segment": segment.pack(
            segment.Kind.DATA, "forward", b"body", session=1, number=2, ack=3, repair=4, arrived=5
        ),
        "segment ping": segment.PING.pack(1, 2),
        "segment pong": segment.PONG.pack(1, 2),
        "segment nack": segment.NACK.pack(1, 2) + segment.RANGE.pack(3, 4),
        "station ping": station.STAMP.pack(station.PING, 0.5),
        "station pong": station.ANSWER.pack(station.PONG, 0.5, 1.5),
    }
    for role in (security.BINDER, security.CONNECTOR):
        made[f"curve keys {role.decode()}"] = b" ".join(security.key_pair(TOKEN, role))
    return {name: data.hex() for name, data in made.items()}


if __name__ == "__main__":
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(json.dumps(golden() | known, indent=0) + "\n")
