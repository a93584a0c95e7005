"""A tensor of more than 2**31 bytes: published, followed, relayed, put into a model and told in a file.

Zeros that nobody writes to take no memory, and what did not change is not looked at here.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from thinwire.files import checkpoint
from thinwire.state import content, intake
from thinwire.state.devices.crossing import Crossing
from thinwire.state.devices.resident import STRETCH, Resident
from thinwire.state.disk.tensor_header import header
from thinwire.state.history import History
from thinwire.state.layout import PIECE, Layout, Slot
from thinwire.state.patches.patch import Patch, Version
from thinwire.state.replica import Replica
from thinwire.state.values import View
from thinwire.state.words import Words

pytest.importorskip("zstandard")
NUMEL = 2**31 + PIECE + 5
PLACES = [0, 2**31 - 1, 2**31, NUMEL - 1]


def zeros(dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.from_numpy(np.zeros(NUMEL * dtype.itemsize, np.uint8)).view(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_a_tensor_of_over_2_to_the_31_elements_is_published_and_followed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    layout = Layout((Slot("small", (3,), dtype), Slot("w", (NUMEL,), dtype)))
    pieces = layout.blocks()
    looked = sorted({0} | {1 + place // PIECE for place in PLACES})
    assert [pieces[i].start for i in looked[1:]] == [place // PIECE * PIECE for place in PLACES]
    monkeypatch.setattr(intake, "batches", lambda layout, found: [looked])
    first = Version(1, content.START)

    def history() -> History:
        made = History(layout)
        made._settle(first)
        return made

    publisher, relay, replica = history(), history(), Replica(layout)
    replica._install(Words(layout), first)
    assert replica.swap()
    replica._back, replica._behind = View(Words(layout)), []  # equal already: nothing is copied
    state = {"small": torch.ones(3).to(dtype), "w": zeros(dtype)}
    state["w"][PLACES] = torch.tensor([1, 2, 3, 4]).to(dtype)
    newest = publisher.publish(state)
    assert newest.changed == 7
    packed = publisher.patch(1).pack()
    assert len(packed) < 3000
    for take in (relay.adopt, replica.apply):
        assert take(Patch.unpack(packed)).hash == newest.hash
    assert replica.swap() and replica.tensors()["w"].shape == (NUMEL,)
    into = zeros(dtype)
    crossing = Crossing(layout, replica._front.slots, [(i, np.array([0], np.int32)) for i in looked])
    crossing.add(into, 1, False, False)
    crossing.go()
    assert into[2**31] == 3 and into[2**31 - 1] == 0  # a first word of a piece, and one not named
    for found in (replica.tensors()["w"], torch.from_numpy(relay._words.slot(1)).view(dtype)):
        assert found[PLACES].tolist() == [1, 2, 3, 4] and not found[2**31 + 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_tensor_of_over_2_to_the_31_elements_is_published_from_a_card_and_put_on_it() -> None:
    x, into = (torch.zeros(NUMEL, dtype=torch.int8, device="cuda") for _ in range(2))
    publisher, relay = (History(Layout((Slot("w", (NUMEL,), torch.int8),))) for _ in range(2))
    for changed in (NUMEL, len(PLACES)):
        newest = publisher.publish({"w": x})
        assert newest.changed == changed
        relay.adopt(publisher.patch(newest.number - 1))
        assert relay.newest.hash == newest.hash == relay._words.hash()
        x[PLACES] = torch.tensor([1, 2, 3, 4], dtype=torch.int8, device="cuda")
    places = [(i, relay._words[i].nonzero()[0].astype(np.int32)) for i in {p // PIECE for p in PLACES}]
    crossing = Crossing(relay.layout, View(relay._words).slots, places)
    crossing.add(into, 0, False, False)
    crossing.go()
    assert torch.equal(into, x)


def test_words_on_a_card_are_counted_from_the_start_of_a_stretch() -> None:
    """So no position there is beyond int32, however large a tensor is."""
    layout = Layout((Slot("small", (3,), torch.int8), Slot("w", (NUMEL,), torch.int8)))
    stretches = Resident(layout, torch.device("cpu"), [0, 1])._stretches
    assert all(0 < stretch.numel <= STRETCH < 2**31 for stretch in stretches)
    parts = [part for stretch in stretches for part in stretch.parts]
    assert [part[:3] for part in parts[:2]] == [(0, 0, 3), (1, 0, stretches[0].numel - 3)]
    assert all(a.stop == b.start for a, b in pairwise(parts[1:])) and parts[-1].stop == NUMEL


def test_a_checkpoint_tells_of_a_tensor_of_over_2_to_the_31_bytes() -> None:
    begin = header({}, [("w", "U8", [NUMEL], NUMEL), ("small", "F32", [3], 12)])
    entries, _, start = checkpoint.read_header(begin, len(begin) + NUMEL + 12)
    assert start == len(begin) and entries["w"][1:] == ((NUMEL,), 0, NUMEL)
    assert entries["small"][1:] == ((3,), NUMEL, NUMEL + 12)
