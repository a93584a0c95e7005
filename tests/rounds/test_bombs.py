"""Messages that ask for memory: refused, or taken, within a few times what the model takes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from federation import Same

from thinwire.channels import wire
from thinwire.channels.channel import SHARED
from thinwire.codecs import Raw
from thinwire.rounds.aggregation import Periodic
from thinwire.rounds.aggregation_server import Rejected, Server
from thinwire.rounds.client_profile import ClientProfile
from thinwire.rounds.model_copy import ModelCopy
from thinwire.rounds.update_messages import Update, VersionForm, VersionMessage
from thinwire.types import DesyncError, Entry, Mode, Packet, Payload, PayloadError, Section, TensorSpec

resource = pytest.importorskip("resource")
zstandard = pytest.importorskip("zstandard")
VALUES = 1 << 20
ROOM = 8 * 4 * VALUES  # bytes: eight models
SIZE = Path("/proc/self/statm")
pytestmark = pytest.mark.skipif(not SIZE.exists(), reason="reads the size of a process from /proc")


@contextmanager
def little_memory() -> Iterator[None]:
    """Let this process take ``ROOM`` more than it has."""
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(SIZE.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def packet(codec: str, parts: list[torch.Tensor], key: int) -> bytes:
    """Return a packet of a row that says it is coded by ``codec``."""
    spec = TensorSpec((1, VALUES))
    section = Section(Mode.DIRECT, codec, Payload(spec, tuple(parts)))
    return wire.pack(Packet(spec, "NoMemory()", "Raw()", (Entry(key, 0, 0, 0),), (section,)))


def packets(key: int) -> list[bytes]:
    """Return packets of a few bytes that claim to be a lot, and some that are a lot."""
    frame = bytes([0x80]) + zstandard.ZstdCompressor().compress(bytes(1 << 28))
    claim = bytes([0x80]) + b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 62) + bytes(32)
    found = [
        packet(codec, [torch.frombuffer(bytearray(data), dtype=torch.uint8)], key)
        for codec in ("Entropy(Raw())", "Entropy(Entropy(Raw()))", "Entropy(Uniform())", "TopK(ratio=1e-9)")
        for data in (frame, claim)
    ]
    counted = torch.frombuffer(bytearray(struct.pack("<I", 0xFFFFFFFF) + bytes(8)), dtype=torch.uint8)
    found.append(packet("HardThreshold(threshold=1)", [counted, torch.zeros(2)], key))
    found.append(packet("InTurn(every=1000000000)", [torch.zeros(2)], key))
    found.append(packet("RandomK(ratio=1)", [torch.zeros(1, dtype=torch.int64)], key))
    return [*found, b"", bytes(ROOM // 2), bytes(4 * ROOM)]


def test_updates_cost_a_server_a_few_models_at_most() -> None:
    server = Server(torch.zeros(1, VALUES), Periodic(), Same())
    server.join(ClientProfile(3, 0.1, 20))
    sequence = server.issue(3).sequence
    before = server.weights
    messages = [Update(3, sequence, 0, 20, 2, data).pack() for data in packets(3)]
    messages.append(bytes(8 * ROOM))
    with little_memory():
        answers = [server.receive(3, data) for data in messages]
    for answer in answers:
        assert isinstance(answer, Rejected) and "alloc" not in answer.reason.lower(), answer
    assert server.weights is before and not server.waiting


def test_versions_cost_a_client_a_few_models_at_most() -> None:
    copy, row = ModelCopy(VALUES), torch.zeros(1, VALUES)
    copy.take(
        VersionMessage(0, 1, 0, 0, VersionForm.FULL, (packet("Raw()", [row[0]], SHARED),), 1, 0.1, Raw())
    )
    messages = [
        VersionMessage(1, 2, 0, 0, form, (data,), 1, 0.1, Raw()).pack()
        for form in (VersionForm.FULL, VersionForm.WHOLE, VersionForm.MISSED)
        for data in packets(SHARED)
    ]
    with little_memory():
        for data in messages:
            with pytest.raises((PayloadError, DesyncError)) as refused:
                copy.take(VersionMessage.unpack(data))
            assert "alloc" not in str(refused.value).lower()
