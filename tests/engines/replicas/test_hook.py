"""A DDP model whose gradients travel by recipe: ``hook_ranks.py``, run once by two ranks, and sizes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thinwire.channels.channel import Scheme
from thinwire.channels.memory import ErrorFeedback
from thinwire.codecs import ChunkTopK, Codec, DeadZone, Entropy, InTurn, RandomK, Raw, TopK, Uniform
from thinwire.engines.replicas import coder
from thinwire.engines.replicas.coder import Coder
from thinwire.engines.replicas.message import Measured, Message
from thinwire.engines.replicas.networks import _capacity
from thinwire.engines.replicas.tally import Tally

RANKS = Path(__file__).with_name("hook_ranks.py")
CHECKS = re.findall(r"^@check\ndef (\w+)", RANKS.read_text(), re.MULTILINE)
LONG = 240.0  # seconds; a limit, not an expectation


def run(program: Path, place: Path, ranks: int) -> list[str]:
    """Return what each of the ranks printed."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(place)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        return [rank.communicate(timeout=LONG)[0] for rank in started]
    finally:
        for rank in started:
            rank.kill()


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run(RANKS, tmp_path_factory.mktemp("hook") / "store", 2)


def test_sites_average_first_and_leaders_exchange(tmp_path: Path) -> None:
    """Two sites of three ranks and one: the same bits everywhere, and the mean of all four."""
    for rank, text in enumerate(run(RANKS.with_name("site_ranks.py"), tmp_path, 4)):
        assert "passed" in text.splitlines(), f"rank {rank}:\n{text[-3000:]}"


def test_loops_as_people_write_them_end_as_plain_ddp_does(tmp_path: Path) -> None:
    for rank, text in enumerate(run(RANKS.with_name("loop_ranks.py"), tmp_path / "store", 2)):
        assert "passed" in text.splitlines(), f"rank {rank}:\n{text[-3000:]}"


@pytest.mark.parametrize("name", CHECKS)
def test_over_two_ranks(name: str, passed: list[str]) -> None:
    if name.startswith("accelerate"):
        pytest.importorskip("accelerate")
    for rank, text in enumerate(passed):
        assert name in text.splitlines(), f"rank {rank}:\n{text[-3000:]}"


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
    own, room = Coder(scheme, shape, (0,), Tally()), _capacity(codec, scheme, shape)
    draw = torch.Generator().manual_seed(3)
    for _ in range(2):  # the second one's rows have a residual
        flat = torch.randn(shape, generator=draw)
        size = len(Message(0, 1, Measured(), own.encode(flat)).pack())
        assert size <= room
    assert codec == Entropy(DeadZone(0.5)) or room < 1.01 * size + 1000
