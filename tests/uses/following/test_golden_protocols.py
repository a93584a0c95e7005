"""What machines say to each other and leave on disks, byte by byte: see ``golden/make_protocols.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "golden"
sys.path.insert(0, str(HERE))

from make_protocols import FILE, HELLO, MATCHED, MESSAGES, REQUEST, SHELF, TOKEN, golden, state  # noqa: E402

from thinwire.files import safetensors  # noqa: E402
from thinwire.links.pair import segment  # noqa: E402
from thinwire.links.relay import handshake  # noqa: E402
from thinwire.state.disk import saved  # noqa: E402
from thinwire.uses.following.pull import manifest  # noqa: E402
from thinwire.uses.following.pull.manifest import Proof  # noqa: E402
from thinwire.uses.following.push import protocol  # noqa: E402

GOLDEN = {name: bytes.fromhex(text) for name, text in json.loads(FILE.read_text()).items()}


@pytest.fixture(scope="module")
def made() -> dict[str, bytes]:
    return {name: bytes.fromhex(text) for name, text in golden().items()}


def parted(data: bytes) -> tuple[object, bytes]:
    """Return header and tensors of a safetensors file."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_are_written_as_they_were(made: dict[str, bytes], name: str) -> None:
    if name == "saved state":  # safetensors puts its notes in any order
        assert parted(made[name]) == parted(GOLDEN[name])
    else:
        assert made[name] == GOLDEN[name]


def test_all_messages_have_golden_bytes(made: dict[str, bytes]) -> None:
    assert set(made) == set(GOLDEN)
    assert {type(m) for m in MESSAGES} == {*protocol.UP.values(), *protocol.DOWN.values()}


def test_golden_bytes_are_read_as_they_were(tmp_path: Path) -> None:
    for m in MESSAGES:
        kinds = protocol.UP if m.KIND in protocol.UP else protocol.DOWN
        assert protocol.unpack(GOLDEN[f"sync {type(m).__name__}"], kinds) == m
    key, asking = handshake.access_key(TOKEN), GOLDEN["relay 2 asking"]
    assert handshake.asked(key, HELLO, asking) == REQUEST
    assert handshake.answered(key, HELLO, asking, GOLDEN["relay 2 answer"]) == MATCHED
    assert manifest.unpack(GOLDEN["shelf manifest"], Proof(None), "here") == SHELF
    assert manifest.unpack(GOLDEN["shelf manifest, signed"], Proof(TOKEN), "here") == SHELF
    assert safetensors.unwrap(GOLDEN["shelf file"]) == b"body"
    found = segment.parse(GOLDEN["segment"])
    assert (found.session, found.number, found.ack, found.repair, found.arrived) == (1, 2, 3, 4, 5)
    assert (found.kind, found.label, found.body) == (segment.Kind.DATA, "forward", b"body")
    (tmp_path / "state").write_bytes(GOLDEN["saved state"])
    words, version = saved.load(tmp_path / "state")
    assert version == state()[1] and words.hash() == state()[0].hash()
