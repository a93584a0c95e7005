"""Devices by name, what is known of them, and what their refusals mean."""

from __future__ import annotations

import re

import pytest
import torch
from commanded import invoke

from thinwire.rounds.local_training import TrainingError
from thinwire.runs.machine import devices
from thinwire.runs.machine.compute import Compute
from thinwire.seeding import seeded
from thinwire.types import InputError, ThinwireError

FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.11 GiB of which "
    "1.25 GiB is free. Process 7 has 77 GiB memory in use."
)
CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no card")


def a_machine_with(monkeypatch: pytest.MonkeyPatch, cards: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)


def test_ranks_share_the_cards_of_a_machine_in_turn(monkeypatch: pytest.MonkeyPatch):
    a_machine_with(monkeypatch, 2)
    for text in ("auto", "cuda"):
        assert [str(devices.choose(text, place)) for place in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [str(devices.choose("cuda:1", place)) for place in range(2)] == ["cuda:1", "cuda:1"]
    assert str(devices.choose("cpu", 1)) == "cpu"
    a_machine_with(monkeypatch, 0)
    assert str(devices.choose("auto", 1)) == "cpu"


@pytest.mark.parametrize(
    ("text", "cards", "told"),
    [
        ("gpu", 0, "device 'gpu' is unknown; it can be auto, cpu, cuda"),
        ("cuda:", 1, "is unknown"),
        ("cuda:2", 2, "there is no device cuda:2, but cuda:0, cuda:1; give one of these"),
        ("mps", 0, "there is no device mps on this machine"),
        ("cuda", 0, r"there is no device cuda(: torch .* is built without CUDA| on this machine)"),
    ],
)
def test_a_device_that_is_not_there(text: str, cards: int, told: str, monkeypatch: pytest.MonkeyPatch):
    a_machine_with(monkeypatch, cards)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InputError, match=told):
        devices.choose(text)


@pytest.mark.parametrize(
    "words",
    [
        *(["train"], ["compare", "fp32", "thinwire"], ["plan", "--measure"], ["generate", "one"]),
        *(["federate", "fedavg"], ["federate-join", "127.0.0.1:1"], ["federate-serve"], ["demo"]),
        *(["pack", "absent", "-o", "x.tw"], ["demo", "models"], ["demo", "federated"], ["demo", "replicas"]),
    ],
)
def test_a_card_that_is_not_there_is_told_before_anything_is_loaded(
    words: list[str], monkeypatch: pytest.MonkeyPatch
):
    a_machine_with(monkeypatch, 1)
    result = invoke(*words, "--device", "cuda:7")
    assert result.exit_code == 2 and "there is no device cuda:7, but cuda:0; give" in result.stderr


def test_a_process_forked_from_one_that_uses_a_card_says_so(monkeypatch: pytest.MonkeyPatch):
    a_machine_with(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(InputError, match=r"forked from one that uses CUDA.*spawn"):
        devices.choose("auto")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            torch.OutOfMemoryError(FULL),
            "cuda:1 is full: 2.00 GiB more were needed, 1.25 GiB were free",
        ),
        (
            RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
            "the device is full; take a smaller",
        ),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "memory is full; take a"),
        (
            RuntimeError("CUDA error: invalid device ordinal\nCUDA kernel errors"),
            "no such device (CUDA error",
        ),
        (AssertionError("Torch not compiled with CUDA enabled"), "there is no such device"),
        (
            RuntimeError("Cannot re-initialize CUDA in forked subprocess."),
            "was forked from one that uses CUDA",
        ),
        (
            RuntimeError("CUDA error: an illegal memory access\nmore"),
            "the GPU failed (CUDA error",
        ),
    ],
)
def test_what_a_device_refuses_is_one_sentence_that_names_the_rank(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ThinwireError, match=rf"^rank 1: .*{re.escape(told)}") as found, devices.told():
        raise error
    assert "\n" not in str(found.value) and found.value.__cause__ is error


def test_a_full_device_is_told_of_where_training_said_it_in_its_own_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(devices.DeviceFull, match=r"^cuda:1 is full: 2.00 GiB more"), devices.told():
        try:
            raise torch.OutOfMemoryError(FULL)
        except RuntimeError as e:
            raise TrainingError("client 3, version 1: training raised it at local step 2") from e


@pytest.mark.parametrize("error", [RuntimeError("shapes"), ValueError("x"), InputError("said already")])
def test_what_is_of_no_device_passes(error: Exception):
    with pytest.raises(type(error)) as found, devices.told():
        raise error
    assert found.value is error


def test_a_model_that_a_card_has_no_room_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "free_bytes", lambda _device: 10**9)
    devices.check_room(torch.device("cuda:0"), 10**9, "the model")
    with pytest.raises(InputError, match=r"the model needs at least 2 GB, and cuda:0 has 1 GB free"):
        devices.check_room(torch.device("cuda:0"), 2 * 10**9, "the model")


def test_hidden_states_cross_in_the_dtype_of_all_cards_and_else_in_float32():
    card, other = (Compute(torch.device("cuda", n), torch.bfloat16) for n in range(2))
    assert card.among([card, other]).crossing == torch.bfloat16
    for end in (Compute(card.device, torch.float16), Compute(dtype=torch.bfloat16), Compute(card.device)):
        assert [one.among([card, end]).crossing for one in (card, end)] == [torch.float32] * 2


def test_seeds_leave_no_generator_changed():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with seeded(0):
        first = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(3))
    torch.set_rng_state(before)
    with seeded(0), seeded():
        assert torch.equal(first, torch.rand(3))
    assert torch.equal(torch.get_rng_state(), before)


@CARD
def test_a_cards_generator_is_left_too():
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    with seeded(0):
        first = torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)
    with seeded(0):
        assert torch.equal(first, torch.rand(3, device="cuda"))


@CARD
def test_the_facts_of_a_card():
    found = devices.facts(devices.choose("cuda"))
    assert found["name"] == torch.cuda.get_device_name(0) and found["memory_bytes"] > 10**9
    with pytest.raises(InputError, match=r"cuda:\d is full"), devices.told():
        torch.empty(1 << 50, device="cuda")
