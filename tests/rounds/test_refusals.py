"""Hostile and faulty updates and versions: refused with a reason, and nothing has changed."""

from __future__ import annotations

import copy
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from codec_examples import CODECS
from federation import SIZES, Federation, kept, model, refused, same, samples, taken
from packets import resigned
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import Scheme, Sender
from thinwire.channels.memory import Delta, Memory, NoMemory
from thinwire.codecs import Codec, Raw, TopK, Uniform
from thinwire.rounds.aggregation import FedBuff, Periodic, Rule
from thinwire.rounds.aggregation_server import Accepted, Rejected
from thinwire.rounds.client import Client
from thinwire.rounds.download import DeltaDownload
from thinwire.rounds.local_training import TrainingError
from thinwire.rounds.model_copy import ModelCopy, sum_of
from thinwire.rounds.parameters import join_rows, unpack_row
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import HEAD, UPDATE, Update, VersionForm, VersionMessage
from thinwire.types import DesyncError, InputError, PayloadError

N = 52  # values of the model
SPARSE = TopK(0.1, Uniform(4, group=16))
EXTREMES = (0, 1, 2, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FC00000, 0xFF800000)


def opened(rule: Rule | None = None) -> tuple[Federation, Update]:
    """Return a federation in its second round, and the update of client 1."""
    federation = Federation(rule, codec=SPARSE)
    federation.round()
    if federation.server.rule.in_rounds:
        federation.server.begin(federation.clients)
    return federation, Update.unpack(federation.update(1))


def packet(row: Tensor, client: int = 1, memory: Memory | None = None) -> bytes:
    """Return a packet of any row."""
    sender = Sender(Scheme(memory=memory or NoMemory()))
    return wire.pack(sender.encode(row, [client])[0])


def values(value: float) -> Tensor:
    """Return a row with one such value."""
    row = torch.zeros(1, N)
    row[0, 7] = value
    return row


def joined(*widths: int, key: int = 1) -> bytes:
    return join_rows([packet(torch.ones(1, n), key) for n in widths])


BAD: dict[str, tuple[Callable[[Update], Update], str]] = {
    "another client's id": (lambda u: replace(u, client=2), "the id of client 2"),
    "another's packet": (lambda u: replace(u, packet=packet(values(1.0), 3)), "where 1 is expected"),
    "another version": (lambda u: replace(u, version=0), "it starts from version 0, and version 1 was given"),
    "a version to come": (lambda u: replace(u, version=9), "it starts from version 9"),
    "an old update": (lambda u: replace(u, sequence=1), "update 1 was taken already"),
    "one not asked for": (lambda u: replace(u, sequence=3), "update 3 was not asked for; 2 is the newest"),
    "no samples": (lambda u: replace(u, samples=0), "trained on 0 samples"),
    "samples of others": (lambda u: replace(u, samples=2**60), f"and the client has {SIZES[1]}"),
    "no steps": (lambda u: replace(u, steps=0), "0 local steps"),
    "a NaN": (lambda u: replace(u, packet=packet(values(torch.nan))), "a NaN or an infinity"),
    "an infinity": (lambda u: replace(u, packet=packet(values(-torch.inf))), "a NaN or an infinity"),
    "a huge value": (lambda u: replace(u, packet=packet(values(3e38))), "beyond 1e+24"),
    "another shape": (lambda u: replace(u, packet=packet(torch.zeros(1, N - 1))), "shape (1, 51)"),
    "a matrix": (lambda u: replace(u, packet=packet(torch.zeros(1, N // 2, 2))), "shape (1, 26, 2)"),
    "more than the model": (
        lambda u: replace(u, packet=packet(torch.zeros(1, N + 1))),
        "over the limit of 208",
    ),
    "another dtype": (lambda u: replace(u, packet=packet(torch.zeros(1, N).half())), "float16"),
    "endless bytes": (lambda u: replace(u, packet=bytes(50_000)), "50046 bytes for 52 values"),
    "no packet": (lambda u: replace(u, packet=b""), "ends 8 bytes too early"),
    "parts too few": (lambda u: replace(u, packet=joined(N - 1)), "joined rows ends"),
    "parts too many": (lambda u: replace(u, packet=joined(20, N - 20, 1)), "too many behind joined rows"),
    "a part too long": (lambda u: replace(u, packet=joined(1, N)), "over the limit of 204"),
    "an empty part": (lambda u: replace(u, packet=joined(0, N)), "where (1, 52) is expected"),
    "a part of another": (lambda u: replace(u, packet=joined(N, key=3)), "where 1 is expected"),
    "what leaves state": (lambda u: replace(u, packet=packet(values(1.0), memory=Delta())), "leave state"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_update_is_refused_and_changes_nothing(name: str) -> None:
    spoil, reason = BAD[name]
    federation, good = opened()
    server, before = federation.server, kept(federation.server)
    bad = spoil(good).pack()
    sent = server.traffic(1).up
    refused(server.receive(1, bad), reason)
    assert kept(server) == before
    traffic = server.traffic(1)
    assert (traffic.up - sent, traffic.refused) == (len(bad), 1)
    taken(server.receive(1, good.pack()))


def test_what_comes_twice_late_or_from_strangers_is_refused() -> None:
    federation, good = opened()
    server = federation.server
    taken(server.receive(1, good.pack()))
    before = kept(server)
    refused(server.receive(1, good.pack()), "update 2 was taken already")
    refused(server.receive(0, good.pack()), "it bears the id of client 1")
    refused(server.receive(99, good.pack()), "client 99 is not known")
    refused(server.receive(1, b""), "too early")
    refused(server.receive(1, good.pack()[:-1]), "checksum")
    refused(server.receive(1, bytes(100)), "not an update")
    assert kept(server) == before
    lost = federation.update(0)
    server.issue(0)
    refused(server.receive(0, lost), "void: the client was given another version")
    late = federation.update(2)
    server.close()
    refused(server.receive(2, late), "late: the round of version 1 is over")


def test_an_old_version_counts_for_less_where_there_are_no_rounds() -> None:
    federation, good = opened(FedBuff(1, a=1.0))
    server = federation.server
    for _ in range(3):
        taken(server.receive(0, federation.update(0)))
    before = server.weights
    assert taken(server.receive(1, good.pack())).staleness == 3
    change = unpack_row(good.packet, N, 1)
    torch.testing.assert_close(server.weights, before - change / 4, atol=1e-6, rtol=0)


def again(data: bytes) -> bytes:
    """Return a damaged update with both check sums made right: without them nothing behind is ever read."""
    start = HEAD.size + UPDATE.size
    inner = data[start:]
    data = data[:start] + (resigned(inner) if len(inner) > 8 else inner)
    return resigned(data)


def damaged(random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return hostile bytes: noise, or one of ``corpus`` cut, changed, grown, or joined to another."""
    data, kind = bytearray(random.choice(corpus)), random.randrange(7)
    at = random.randrange(8, len(data) - 4)
    if kind == 0:
        return random.randbytes(random.randrange(300))
    if kind == 1:
        del data[at:]
    elif kind == 2:
        data[at] ^= random.randrange(1, 256)
    elif kind == 3:
        form, mask = random.choice([("<H", 0xFFFF), ("<I", 0xFFFFFFFF), ("<Q", 2**64 - 1)])
        word = random.choice((*EXTREMES, 2**63)) & mask
        data[at : at + struct.calcsize(form)] = struct.pack(form, word)
    elif kind == 4:
        data[at:at] = random.randbytes(random.randrange(1, 9))
    elif kind == 5:
        data[at:] = random.choice(corpus)[at:]
    else:
        data += bytes(random.choice((1, 8, 500, 50_000)))
    return bytes(data)


def hostile(federation: Federation, good: Update) -> list[bytes]:
    """Return updates to begin from: the good one, others' and every bad one."""
    bad = [spoil(good).pack() for spoil, _ in BAD.values()]
    others = [federation.update(client) for client in (0, 2, 3)]
    dense = replace(good, packet=packet(values(1.0))).pack()
    return [*[good.pack(), dense] * 8, *others, *bad]  # most begin from one that would be taken


def test_sixteen_thousand_hostile_updates() -> None:
    federation, good = opened(Periodic())
    server, random, found = federation.server, Random(1), Counter[str]()
    corpus = hostile(federation, good)
    state, before, weights = server.state_dict(), kept(server), server.weights
    for case in range(16_000):
        sender = 1 if random.random() < 0.9 else random.choice((0, 2, 3, 99))
        data = damaged(random, corpus)
        answer = server.receive(sender, again(data) if len(data) > HEAD.size + UPDATE.size else data)
        found[type(answer).__name__] += 1
        if isinstance(answer, Accepted):  # other values, or other numbers that are possible
            assert server.close() == 2 and bool(server.weights.isfinite().all())
            server.load_state_dict(state)
            weights = server.weights
        else:
            assert isinstance(answer, Rejected) and answer.reason.strip() and "\n" not in answer.reason
            assert server.weights is weights and server.version == 1 and not server.waiting
        if case % 500 == 0:
            assert kept(server) == before
    assert kept(server) == before and found["Rejected"] > 12_000 and found["Accepted"] > 100, found


def versions(codec: Codec) -> list[VersionMessage]:
    """Return a version of each form, for a client that holds version 0."""
    draw = torch.Generator().manual_seed(2)
    rows = [torch.randn(1, N, generator=draw) for _ in range(2)]
    outlet = DeltaDownload(codec).open(rows[0])
    whole = VersionMessage(0, 1, 0, outlet.check, *outlet.lead(None), 1, 0.1, Raw())
    held = whole.held
    outlet.advance(rows[1])
    number, check, patch = 1, outlet.check, outlet._patch(0)  # type: ignore[attr-defined]
    missed = VersionMessage(number, 1, 0, check, *outlet.lead(held), 1, 0.1, Raw())
    return [
        missed,
        replace(missed, form=VersionForm.PATCH, packets=(patch,)),
        replace(whole, form=VersionForm.WHOLE),
    ]


def test_four_thousand_hostile_versions_leave_a_client_that_asks_for_the_whole() -> None:
    *later, whole = versions(Uniform(4, group=16))
    assert [v.form for v in later] == [VersionForm.MISSED, VersionForm.PATCH]
    full = VersionMessage(
        1, 1, 0, sum_of(values(1.0)), VersionForm.FULL, (packet(values(1.0), 0),), 1, 0.1, SPARSE
    )
    random, found = Random(2), Counter[str]()
    corpus = [v.pack() for v in (whole, *later, full)]
    client = Client(1, model(), samples(1), ClientResiduals())
    client.train(whole)
    row = client._copy.take(whole)
    for case in range(4_000):
        data = resigned(damaged(random, corpus).ljust(8, b"\0"))
        state = client.residuals.state_dict() if case % 50 == 0 else {}
        try:
            version = VersionMessage.unpack(data)
            packets = tuple(resigned(bytes(p)) if p[:2] == wire.MAGIC else p for p in version.packets)
            client.train(replace(version, packets=packets, sequence=client.sequence + 1, steps=1))
            found["taken"] += 1
        except (PayloadError, DesyncError, TrainingError, InputError) as e:
            found[type(e).__name__] += 1
            assert str(e).strip() and "\n" not in str(e)
            if state:
                after = client.residuals.state_dict()
                assert all(name.startswith("sent.") for name in state.keys() - after.keys())  # confirmed
                assert all(torch.equal(after[name], x) for name, x in state.items() if name in after)
        if client._copy.held != whole.held:
            assert same(client._copy.take(whole), row)
    assert found["PayloadError"] > 1000 and found["DesyncError"] > 50 and found["taken"] > 50, found


@pytest.fixture(scope="module")
def second_round() -> Federation:
    """A federation in its second round, to be copied."""
    return opened()[0]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_server_may_ask_for_any_codec(codec: Codec, second_round: Federation) -> None:
    federation = copy.deepcopy(second_round)
    version = federation.server.issue(2)
    before = {name: x.clone() for name, x in federation.residuals.state_dict().items()}
    try:
        federation.clients[2].train(replace(version, codec=codec))
    except (InputError, PayloadError):
        after = federation.residuals.state_dict()
        assert all(torch.equal(after[name], x) for name, x in before.items() if name in after)


def test_versions_that_do_not_follow_are_not_taken() -> None:
    missed, patch, whole = versions(Uniform(4, group=16))
    for version in (missed, patch):
        with pytest.raises(DesyncError, match="leads on from another"):
            ModelCopy(N).take(version)
    copy = ModelCopy(N)
    copy.take(whole)
    with pytest.raises(DesyncError, match="differs from the server's"):
        copy.take(replace(missed, check=missed.check ^ 1))
    assert copy.held is None
    with pytest.raises(PayloadError, match="no patch to it"):
        copy.take(replace(whole, number=5))


def test_wrong_calls_are_refused_in_one_sentence() -> None:
    federation = Federation()
    server = federation.server
    for call, text in (
        (lambda: server.begin([0, 9]), "clients \\[9\\] are not here"),
        (lambda: server.begin([]), "nobody is asked"),
        (lambda: server.issue(0), "client 0 is not to train now"),
        (lambda: server.issue(9), "client 9 is not known"),
        (lambda: server.traffic(9), "client 9 is not known"),
        (lambda: Federation(Periodic()).server.begin([0]), "knows no rounds"),
    ):
        with pytest.raises(InputError, match=text):
            call()  # type: ignore[no-untyped-call]
    server.begin([0])
    with pytest.raises(InputError, match="is open; close it first"):
        server.begin([1])
    server.leave(0)
    with pytest.raises(InputError, match="client 0 has left"):
        server.issue(0)


def test_an_update_is_read_as_it_was_written() -> None:
    update = Update(2**62, 3, 4, 5, 6, b"packet")
    assert len(update.pack()) == update.nbytes and Update.unpack(update.pack()) == update
    assert update.pack().hex() == (
        "544604010beda7fb00000000000000400300000000000000040000000000000005000000000000000600000000007061636b6574"
    )
    version = VersionMessage(5, 6, 4, 7, VersionForm.MISSED, (b"ab",), 3, 0.5, TopK(0.1), work=b"xyz")
    assert version.pack().hex() == (
        "54460402bde98659"
        "0500000000000000"
        "0600000000000000"
        "0400000000000000"
        "07000000"
        "03"
        "0100"
        "03000000"
        "000000000000e03f"
        "0000000000000000"
        "0000000000000000"
        "0f00546f704b28726174696f3d302e3129"
        "03000000"
        "78797a"
        "020000006162"
    )
    for version in versions(SPARSE):
        assert len(version.pack()) == version.nbytes and VersionMessage.unpack(version.pack()) == version
