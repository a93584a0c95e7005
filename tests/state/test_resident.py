"""A publisher whose tensors are on another device: the bytes of one on the CPU, one copy and one wait."""

from __future__ import annotations

import warnings

import pytest
import states
import torch
from each import each
from state_devices import DEVICES, on
from torch import Tensor

from thinwire.state.devices import resident
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.types import InputError


def state() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    return states.tensors() | {
        "turned": torch.randn(30, 20, generator=g).t(),
        "gaps": torch.randn(40, 6, generator=g)[::2, 1:],
        "complex": torch.randn(9, generator=g, dtype=torch.complex64).conj(),
        "half": torch.randn(70, generator=g).half(),
        "eight": torch.randn(33, generator=g).to(torch.float8_e4m3fn),
        "still": torch.zeros(300),
    }


def moved(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the tensors on a device, some of them: a model may be on several."""
    there = {name: x if name in ("half", "mask") else x.to(device) for name, x in tensors.items()}
    return there | {"head": there["embed"]}


def change(tensors: dict[str, Tensor], share: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for name, x in tensors.items():
        x = x.view(torch.uint8) if name == "eight" else x
        if name not in ("head", "still") and x.numel():
            hit = torch.rand(x.shape, generator=g) < share
            x.copy_(torch.where(hit, x.flip(0) if x.dim() else x + 1, x))


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_publishes_the_bytes_that_the_cpu_does_in_one_copy(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = state()
    with on(device, monkeypatch) as seen:
        layout = Layout.of(tensors, torch.bfloat16, {"lossy": states.BOUND})
        here, there = History(layout), History(layout)
        looks = []
        for i, share in enumerate((0, 0.02, 0.02, 0.5, 0.5, 0.1, 0.02)):
            change(tensors, share, i)
            copies = moved(tensors, device)
            if seen:
                seen.clear()
            with torch.inference_mode(i == 0):
                there.publish(copies, {}, 1.0)
            if seen and i and i != 5:
                assert seen.to_host == len(seen.waits) in (1, 2) and not seen.to_device
                looks.append(seen.to_host)
            if i == 4:
                there._taking.keep([])  # as after a failure: the words are copied there anew
            here.publish(tensors, {}, 1.0)
            assert there.newest == here.newest and there.newest.hash == there._words.hash()
            for base in range(max(1, i), i + 1):
                assert there.patch(base, mark=False).body == here.patch(base, mark=False).body
        assert there.patch(1).body == here.patch(1).body and there.patch().body == here.patch().body
        assert looks in ([], [2, 1, 2, 1, 1]), "a second look where many more changed than before"


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_refuses_and_warns_as_the_cpu_does(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []
    for place in (torch.device("cpu"), device):
        with on(device, monkeypatch):
            known = {"w": torch.zeros(3), "v": torch.zeros(90)}
            history, said = History(Layout.of(known, torch.float16, {"v": 0.1})), list[str]()
            for w, v in ((1.0, 0.5), (7e4, 0.7), (8e4, float("nan")), (2.0, 1e9)):
                tensors = {"w": torch.full((3,), w).to(place), "v": torch.full((90,), v).to(place)}
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    try:
                        history.publish(tensors)
                    except InputError as e:
                        said.append(str(e))
                said += [str(w.message) for w in caught]
                assert history.newest.hash == history._words.hash()
            history.overflows.strict = True
            with pytest.raises(InputError, match="3 values of w are too large"):
                history.publish({"w": torch.full((3,), 9e4).to(place), "v": torch.zeros(90).to(place)})
            assert history.publish({"w": torch.ones(3).to(place), "v": torch.zeros(90).to(place)}).number == 3
            told.append(said)
    assert told[0] == told[1] and len(told[0]) == 3


@pytest.mark.parametrize("device", DEVICES)
@each("name", ["_now", "_found", "settle"])
def test_a_device_that_was_full_goes_on_with_the_same_versions(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, calls = {n: x for n, x in state().items() if n in ("gaps", "half", "still")}, []
    doing = getattr(resident.Resident, name)

    def elsewhere() -> dict[str, Tensor]:
        return {name: x.to(device) for name, x in tensors.items()}

    def full(*args: object) -> object:
        calls.append(name)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return doing(*args)

    with on(device, monkeypatch):
        here, there = (History(Layout.of(tensors, torch.bfloat16)) for _ in range(2))
        for i in range(4):
            change(tensors, 0.1, i)
            here.publish(tensors, {}, 1.0)
            if i != 2:
                there.publish(elsewhere(), {}, 1.0)
                continue
            before = there.newest
            with monkeypatch.context() as m, pytest.raises(torch.OutOfMemoryError):
                m.setattr(resident.Resident, name, full)
                there.publish(elsewhere(), {}, 1.0)
            assert there.newest == before and before.hash == there._words.hash()
            there.publish(elsewhere(), {}, 1.0)
        assert there.newest == here.newest and there.newest.hash == there._words.hash()
        assert there.patch(1).body == here.patch(1).body and there.patch().body == here.patch().body
