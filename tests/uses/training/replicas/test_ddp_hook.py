"""A DDP model whose gradients travel by recipe: ``hook_ranks.py``, run once by three ranks, and sizes."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from launchers import warm

from thinwire.channels.channel import Scheme
from thinwire.channels.memory import ErrorFeedback
from thinwire.codecs import ChunkTopK, Codec, DeadZone, Entropy, InTurn, RandomK, Raw, TopK, Uniform
from thinwire.uses.training.replicas import coder
from thinwire.uses.training.replicas.controller import ExchangeMessage, Measurement
from thinwire.uses.training.replicas.networks import _capacity
from thinwire.uses.training.replicas.transport import ReplicaTally

RANKS = Path(__file__).with_name("hook_ranks.py")
FORK = RANKS.with_name("fork_ranks.py")
CHECKS = re.findall(r"^@check\ndef (\w+)", RANKS.read_text(), re.MULTILINE)
LONG = 240.0  # seconds; a limit, not an expectation


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what each of the ranks printed."""
    place = tmp_path_factory.mktemp("hook")
    store = place / "store"
    started = warm().python(place, FORK, RANKS, 3, store)
    try:
        with suppress(TimeoutError):
            started.wait(LONG)
    finally:
        with suppress(ProcessLookupError):
            started.signal(signal.SIGKILL, group=True)
    return [store.with_name(f"store.{rank}").read_text() for rank in range(3)]


def check(name: str, printed: list[str]) -> None:
    for rank, text in enumerate(printed):
        assert name in text.splitlines(), f"rank {rank}:\n{text[-3000:]}"


def test_sites_average_first_and_leaders_exchange(printed: list[str]) -> None:
    """Two sites of two ranks and one: the same bits everywhere, and the mean of all three."""
    check("sites", printed)


def test_loops_as_people_write_them_end_as_plain_ddp_does(printed: list[str]) -> None:
    check("loops", printed[:2])


@pytest.mark.parametrize("name", CHECKS)
def test_over_two_ranks(name: str, printed: list[str]) -> None:
    if name.startswith("accelerate"):
        pytest.importorskip("accelerate")
    check(name, printed[:2])


@pytest.mark.parametrize("shape", [(1, 4096), (7, 1 << 16)])
@pytest.mark.parametrize(
    "codec",
    [
        Raw(),
        Uniform(4, group=64),
        ChunkTopK(0.01),
        TopK(0.01),
        RandomK(0.01),
        InTurn(10, values=TopK(0.2, Uniform(4, group=128))),
        Entropy(DeadZone(0.5)),
    ],
    ids=repr,
)
def test_a_message_over_a_group_never_needs_more_than_its_room(
    codec: Codec, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coder, "BLOCK", 1 << 18)  # two packets of the larger one
    scheme = Scheme(codec, ErrorFeedback())
    own, room = coder.Coder(scheme, shape, ReplicaTally()), _capacity(codec, scheme, shape)
    draw = torch.Generator().manual_seed(3)
    for _ in range(2):  # the second one's rows have a residual
        flat = torch.randn(shape, generator=draw)
        message = own.encode(flat)
        assert message is not None
        size = len(ExchangeMessage(0, 1, Measurement(), message.packets).pack())
        assert size <= room
    assert codec == Entropy(DeadZone(0.5)) or room < 1.01 * size + 1000
