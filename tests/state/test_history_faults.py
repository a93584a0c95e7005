"""Versions that fail half-way, numbers and bounds that cannot be: a history stays as it was."""

from __future__ import annotations

import pytest
import states
import torch
from torch import Tensor

from thinwire.state import history as histories
from thinwire.state import intake
from thinwire.state import log as logs
from thinwire.state.devices import taking
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.replica import Replica
from thinwire.types import InputError

pytest.importorskip("zstandard")


def fail_once(monkeypatch: pytest.MonkeyPatch, where: object, name: str, error: type[BaseException]) -> None:
    """Let a function do what it does and then raise, the first time."""
    doing, calls = getattr(where, name), []

    def failing(*args: object) -> object:
        found = doing(*args)
        calls.append(name)
        if len(calls) == 1:
            raise error
        return found

    monkeypatch.setattr(where, name, failing)


def published(n: int = 4) -> tuple[History, dict[str, Tensor]]:
    """Return a history of ``n`` versions, whose log has room for two, and what it last published."""
    state = states.tensors()
    history = History(states.layout(state), budget=0)
    for i in range(n):
        states.train(state, 0.1, i)
        history.publish(state)
    return history, state


def inside(history: History) -> tuple[object, ...]:
    log = history._log
    return history.newest, history._words.hash(), [e.base for e in log._entries], log.nbytes, history._known


FAULTS = [(histories, "logged", MemoryError), (logs, "merge", MemoryError)]
FAULTS += [(History, "_settle", KeyboardInterrupt), (intake, "take", KeyboardInterrupt)]
FAULTS += [(taking, "_note", KeyboardInterrupt)]


@pytest.mark.parametrize(("where", "name", "error"), FAULTS, ids=[name for _, name, _ in FAULTS])
@pytest.mark.parametrize("share", [0.05, 0.9])
def test_a_version_that_fails_after_the_words_are_taken_never_was(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, error: type[BaseException], share: float
) -> None:
    history, state = published()
    replica = Replica(history.layout)
    held = replica.apply(states.over_the_wire(history.patch()))
    before = inside(history)
    states.train(state, share, 9)
    fail_once(monkeypatch, where, name, error)
    with pytest.raises(error):
        history.publish(state)
    assert inside(history) == before and history._words.hash() == held.hash
    newest = history.publish(state)
    assert replica.apply(states.over_the_wire(history.patch(held.number))).hash == newest.hash
    assert replica.swap() and states.same(replica.tensors(), states.whole(history))


@pytest.mark.parametrize("keyframe", [False, True])
def test_a_relay_that_fails_to_move_on_is_where_it_was(
    monkeypatch: pytest.MonkeyPatch, keyframe: bool
) -> None:
    history, state = published()
    relay = History(history.layout)
    relay.adopt(states.over_the_wire(history.patch()))
    states.train(state, 0.1, 9)
    held, newest = relay.newest, history.publish(state)
    past, first = relay._remember(), relay._words.copy()
    before = inside(relay)
    patch = states.over_the_wire(history.patch(None if keyframe else held.number))
    fail_once(monkeypatch, histories, "logged", MemoryError)
    with pytest.raises(MemoryError):
        relay.adopt(patch)
    assert inside(relay) == before and relay._words.hash() == held.hash
    assert relay.adopt(patch).hash == newest.hash == relay._words.hash()
    for i, piece in enumerate(relay.layout.blocks()):  # whoever reads the version before still does
        assert (past.words(i, 0, piece.numel) == first[i]).all()


def test_a_number_that_cannot_be_given_leaves_one_entry_a_base(monkeypatch: pytest.MonkeyPatch) -> None:
    history, _ = published(2)
    before = inside(history)
    fail_once(monkeypatch, History, "_settle", MemoryError)
    with pytest.raises(MemoryError):
        history.outnumber(9)
    assert inside(history) == before and history.outnumber(9).number == 10


ROUNDED = [(torch.bfloat16, 3.1), (torch.float16, 9.003), (torch.float8_e4m3fn, 3.1)]


@pytest.mark.parametrize(("dtype", "far"), ROUNDED, ids=lambda v: str(v))
def test_a_bound_that_the_dtype_rounds_away_is_refused(dtype: torch.dtype, far: float) -> None:
    state = {"w": torch.linspace(-0.01, 0.01, 300)}
    history = History(Layout.of(state, dtype, {"w": 1e-3}))
    history.publish(state)
    assert (states.whole(history)["w"].float() - state["w"]).abs().max() <= 2e-3
    newest, grown = history.newest, {"w": state["w"].clone()}
    grown["w"][3] = far
    with pytest.raises(InputError, match=rf"w has values up to .*{dtype} cannot hold within a bound of"):
        history.publish(grown)
    assert history.newest is newest and history._words.hash() == newest.hash
    exact = History(Layout.of(grown, torch.float32, 1e-3))
    exact.publish(grown)
    assert (states.whole(exact)["w"] - grown["w"]).abs().max() <= 1e-3 * 1.001
