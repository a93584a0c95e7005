"""Small states that tests publish: every kind of tensor, and what a trainer does to them."""

from __future__ import annotations

import random

import pytest
import torch

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patch_code import classes
from thinwire.state.patches import body
from thinwire.state.patches.draft import Draft
from thinwire.state.patches.moves import SectionReading
from thinwire.state.patches.pages import Pages
from thinwire.state.patches.patch import Patch, Version
from thinwire.state.replica import Replica

BOUND = 0.01


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a tied weight, a lossy one, an empty one, and one of each other kind."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 13, generator=g)
    return {
        "embed": weight,
        "head": weight,
        "lossy": torch.randn(97, generator=g),
        "exact": torch.randn(3, 5, generator=g, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "one": torch.randn((), generator=g),
        "count": torch.randint(-9, 9, (7,), generator=g),
        "bytes": torch.randint(0, 255, (11,), generator=g, dtype=torch.uint8),
        "mask": torch.rand(9, generator=g) < 0.5,
    }


def by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even small patches be coded by class, over several runs of each piece."""
    for name, value in {"_FEWEST": 1, "_PER_CLASS": 0, "_PER_MEMBER": 0, "_OFTEN": 1, "_SAMPLE": 16}.items():
        monkeypatch.setattr(classes, name, value)
    monkeypatch.setattr(classes, "RUN", 64)


def in_sections(monkeypatch: pytest.MonkeyPatch, changes: int = 4) -> None:
    """Let even small patches have several sections."""
    monkeypatch.setattr(body, "FEWEST", changes)


def layout(state: dict[str, torch.Tensor] | None = None) -> Layout:
    return Layout.of(state or tensors(), torch.bfloat16, {"lossy": BOUND})


def train(state: dict[str, torch.Tensor], share: float = 0.1, seed: int = 1) -> None:
    """Change about ``share`` of all elements, in place."""
    g = torch.Generator().manual_seed(seed)
    for name, x in state.items():
        if name != "head":
            hit = torch.rand(x.shape, generator=g) < share
            other = tensors(seed + 1000)[name]
            x.copy_(torch.where(hit, other, x))


def whole(history: History) -> dict[str, torch.Tensor]:
    """Return what a new follower of a history gets."""
    replica = Replica(history.layout)
    replica.apply(over_the_wire(history.patch()))
    assert replica.swap()
    return {name: x.clone() for name, x in replica.tensors().items()}


def copy_of(replica: Replica) -> Replica:
    """Return another replica that holds the same, in front."""
    other = Replica(replica.layout)
    other._install(replica._newest().words.copy(), replica.held)
    other.swap()
    return other


def draft(base: int, version: int, nbytes: int, whole: bool = True) -> Draft:
    """Return a draft of so many bytes, all zeros."""
    made = Draft(base, base and 1000 + base, version, 1000 + version)
    made.add([bytes(nbytes)])
    made.head = b"head" if whole else b""
    return made


def over_the_wire(patch: Patch) -> Patch:
    return Patch.unpack(patch.pack())


def piecemeal(patch: Patch, target: Replica | History, seed: int = 0) -> Version:
    """Let a target read a patch as it comes, in pieces of any size, and then move on by it."""
    packed, came, g = patch.body, Pages(), random.Random(seed)
    reading = target.reading(patch.base_hash)
    while len(came) < len(packed):
        came.add(packed[len(came) :][: g.choice([1, 7, 100, 1000])])
        if reading is not None:
            reading.feed(came)
    return move(target, Patch.join(patch.head(), came), reading)


def move(target: Replica | History, patch: Patch, reading: SectionReading | None) -> Version:
    """Let a target move on by a patch."""
    return (target.apply if isinstance(target, Replica) else target.adopt)(patch, reading)


def held(target: Replica | History) -> int:
    """Return the hash of what a target holds."""
    return target.held.hash if isinstance(target, Replica) else target.newest.hash


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Return whether two states are the same bits, whatever these mean."""
    return a.keys() == b.keys() and all(
        x.dtype == b[n].dtype and x.shape == b[n].shape and _bits(x) == _bits(b[n]) for n, x in a.items()
    )


def _bits(x: torch.Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
