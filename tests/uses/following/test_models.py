"""Models that publish and follow: replaced parameters, compiled ones, ones without memory, bases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from following import Model, Small, publisher, same, small, train, used, weights
from torch import nn
from waiting import HOST

from thinwire.state.layout import Layout
from thinwire.state.patches import moves
from thinwire.types import InputError
from thinwire.uses.following.mirror import Mirror
from thinwire.uses.following.pull.store_reader import ShelfReader
from thinwire.uses.following.pull.store_writer import ShelfWriter
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher


def test_a_model_is_brought_forward_between_two_steps() -> None:
    w, model = weights(), Model()
    with publisher(w) as p, Follower(HOST, p.port) as f:
        p.publish()
        f.wait(1)
        applied = f.apply_to(model)
        assert (
            applied.pause > 0
            and applied.new
            and applied.version == f.held
            and same(dict(model.state_dict()), used(w))
        )
        before, first = model.embed.clone(), used(w)
        train(w)
        p.publish()
        f.wait(2)
        assert same(dict(model.state_dict()), first)  # nothing moves under the consumer
        f.apply_to(model)
        assert same(dict(model.state_dict()), used(w)) and not torch.equal(before, model.embed)


def replaced(model: Small) -> None:
    model.w = nn.Parameter(model.w.detach().clone())


def assigned(model: Small) -> None:
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [replaced, assigned])
def test_a_model_whose_parameters_were_replaced_goes_on_following(change: Callable[[Small], None]) -> None:
    w, model = small(), Small()
    with Publisher(w) as p, Follower(HOST, p.port) as f:
        p.publish(1)
        f.wait(1)
        assert f.apply_to(model).new and not f.apply_to(model).new
        change(model)
        assert f.apply_to(model).new and not f.apply_to(model).new
        w["w"] += 1
        f.wait(p.publish(2).number)
        assert f.apply_to(model).new
        assert torch.equal(model.w, w["w"]) and model.w.data_ptr() == f.tensors()["w"].data_ptr()


def test_what_a_model_has_besides_the_state_may_be_replaced() -> None:
    w, model = small(), Small()
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    with Publisher(w) as p, Follower(HOST, p.port) as f:
        p.publish(1)
        f.wait(1)
        assert f.apply_to(model).new
        model.cache = torch.ones(1)
        assert not f.apply_to(model).new


def test_a_compiled_model_is_published_and_follows_under_its_own_names() -> None:
    part = torch.compile(nn.Linear(3, 2), backend="eager")
    trained, used = torch.compile(nn.Sequential(nn.Linear(3, 2)), backend="eager"), nn.Sequential(part)
    with Publisher(trained) as p, Follower(HOST, p.port, into=used) as f:
        assert [*p.history.layout.index] == ["0.weight", "0.bias"]
        p.publish(1)
        f.wait(1)
        f.apply_to(used)
        assert all(torch.equal(a, b) for a, b in zip(used.parameters(), trained.parameters(), strict=True))


@pytest.mark.parametrize("into", [False, True])
def test_a_model_without_memory_is_refused(into: bool) -> None:
    trained, empty = nn.Linear(3, 2), nn.Linear(3, 2, device="meta")
    with Publisher(trained) as p, Follower(HOST, p.port, into=empty if into else None) as f:
        p.publish(1)
        with pytest.raises(InputError, match=r"weight is on the meta device.*to_empty\(device=...\)"):
            f.wait(1)
            f.apply_to(empty)


def test_a_model_without_shapes_is_refused() -> None:
    with pytest.raises(InputError, match="weight is lazy and has no shape yet; run one batch"):
        Publisher(nn.LazyLinear(3))
    with Publisher(nn.Linear(3, 2)) as p, Follower(HOST, p.port) as f:
        p.publish(1)
        f.wait(1)
        with pytest.raises(InputError, match="weight is lazy"):
            f.apply_to(nn.LazyLinear(2))


def test_only_apply_to_touches_a_model(tmp_path: Path) -> None:
    w, model = small(), Small()
    mine = model.w.data_ptr()
    with Publisher(w) as p, Follower(HOST, p.port, into=model, state=tmp_path / "state") as f:
        p.publish(1)
        f.wait(1)
        assert model.w.data_ptr() == mine and not model.w.any()
        f.apply_to(model)
        assert torch.equal(model.w, w["w"])
        other = Small()
        f.close()
        with Follower(HOST, p.port, into=other, state=tmp_path / "state") as again:
            again.wait(1)
            assert not other.w.any()
            again.apply_to(other)
            assert torch.equal(other.w, w["w"])
    with (
        ShelfWriter.of(tmp_path / "store", w) as writer,
        ShelfReader(tmp_path / "store", poll=0.05) as reader,
    ):
        writer.publish(1)
        reader.wait(1)
        third, fourth = Small(), Small()
        for model in (third, fourth):
            reader.apply_to(model)
        w["w"] += 1
        reader.wait(writer.publish(2).number)
        reader.apply_to(third)
        assert torch.equal(third.w, w["w"]) and torch.equal(fourth.w, w["w"])


def test_tensors_are_the_newest_even_while_words_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    w = small()
    writing = moves.write

    def slow(words: Any, made: Any) -> None:
        sleep(0.2)  # far longer than a swap waits
        writing(words, made)

    monkeypatch.setattr(moves, "write", slow)
    with Publisher(w) as p, Follower(HOST, p.port) as f:
        p.publish(0)
        f.wait(1)
        for step in range(2, 8):
            w["b"] += 1
            p.publish(step)
            held = f.wait(step).number
            assert f.tensors()["b"][0] >= held - 1


class Counting(nn.Linear):
    """A module that keeps something besides its tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: object) -> None:
        pass


def test_what_a_module_keeps_besides_tensors_is_not_published() -> None:
    model, copy = Counting(3, 2), Counting(3, 2)
    with Publisher(model) as p, Follower(HOST, p.port, into=copy) as f:
        p.publish()
        f.wait(1)
        f.apply_to(copy)
        assert set(f.tensors()) == {"weight", "bias"} and torch.equal(copy.weight, model.weight)


def test_a_model_whose_weights_no_bound_can_hold_is_followed_without_a_base() -> None:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, float("nan"))
    mirror = Mirror(model)
    mirror.agree(Layout.of(dict(model.named_parameters()), bounds=1e-3), "state")
    assert mirror.replica is not None and not mirror.held.hash


def test_weights_that_no_bound_can_hold_are_no_base_of_a_relay() -> None:
    model, trained = nn.Linear(3, 2), nn.Linear(3, 2)
    nn.init.constant_(model.weight, float("nan"))
    with Publisher(trained, bounds=1e-3) as p:
        p.publish()
        with Follower(HOST, p.port, into=model, relay=(HOST, 0)) as f:
            f.wait(1)
            f.apply_to(model)
            assert (model.weight - trained.weight).abs().max() < 2e-3
