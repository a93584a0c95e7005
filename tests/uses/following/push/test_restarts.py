"""Publishers and followers that start again, with and without a file, with the same state or another."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from commanded import invoke
from following import publisher, same, train, used, weights
from waiting import HOST, LONG, until

from thinwire.state.history import History
from thinwire.types import InputError, LinkError
from thinwire.uses.following.pull.store_writer import ShelfWriter
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher


def test_a_publisher_that_restarts_with_the_same_weights_goes_on_by_patches() -> None:
    w = weights(rows=2000)
    with publisher(w) as p:
        port = p.port
        for _ in range(5):
            train(w)
            p.publish()
        f = Follower(HOST, port)
        f.wait(5)
    with f:
        with publisher(w, port=port) as p:
            p.publish()  # its version 1 has the contents of the follower's 5
            train(w, 1e-5)
            version = p.publish()
            until(lambda: f.held.hash == version.hash)
            assert f.held.number > 5 and same(f.tensors(), used(w))
            assert f.arrivals[-1].nbytes < f.arrivals[0].nbytes / 5
            assert f.status.restarts == 1
        with publisher(weights(seed=9, rows=2000), port=port) as p:  # other weights: a keyframe
            version = p.publish()
            until(lambda: f.held.hash == version.hash)
            assert f.arrivals[-1].nbytes > f.arrivals[0].nbytes / 2
            assert same(f.tensors(), used(weights(seed=9, rows=2000)))
        numbers = [a.version for a in f.arrivals]
        assert numbers == sorted(set(numbers))


def test_a_publisher_that_restarts_with_another_layout_is_refused_by_name() -> None:
    with publisher(weights()) as p:
        port = p.port
        p.publish()
        f = Follower(HOST, port)
        f.wait(1)
    with f, publisher(weights(rows=301), port=port) as p:
        p.publish()
        with pytest.raises(
            InputError,
            match=r"embed is bfloat16 \[301, 200\] at the publisher and bfloat16 \[300, 200\] here",
        ):
            f.wait(2, LONG)
        assert f.held.number == 1


def test_a_follower_goes_on_from_its_saved_state(tmp_path: Path) -> None:
    w, path = weights(rows=2000), tmp_path / "state.safetensors"
    with publisher(w) as p:
        p.publish()
        with Follower(HOST, p.port, state=path) as f:
            f.wait(1)
            first = f.arrivals[0].nbytes
        for _ in range(3):
            train(w, 1e-5)
            p.publish()
        with Follower(HOST, p.port, state=path) as f:
            assert f.wait(4).number == 4
            assert same(f.tensors(), used(w)) and f.arrivals[0].nbytes < first / 5


def test_a_publisher_that_starts_again_from_its_file_sends_a_patch(tmp_path: Path) -> None:
    w, path = weights(), tmp_path / "publisher.safetensors"
    with publisher(w, state=path) as p, Follower(HOST, p.port) as f:
        p.publish()
        f.wait(1)
        train(w)
        p.publish()
        f.wait(2)
        port = p.port
        p.close()
        assert path.is_file()
        train(w)
        with publisher(w, port=port, state=path) as again:
            assert again.newest.number == 2 and f.wait(2).number == 2
            again.publish()
            f.wait(3)
            assert same(f.tensors(), used(w)) and f.arrivals[-1].nbytes < f.arrivals[0].nbytes / 4


def test_a_publisher_offers_nothing_from_its_file_before_it_publishes(tmp_path: Path) -> None:
    w, path = weights(), tmp_path / "publisher.safetensors"
    with publisher(w) as p:
        p.publish()
        p.save(path)
        with Follower(HOST, p.port) as f:
            train(w)
            p.publish()
            newest = f.wait(2)
            port = p.port
            p.close()
            with publisher(w, port=port, state=path) as again:  # of version 1
                until(lambda: any(s.greeted for s in again.followers))
                sleep(0.1)
                assert f.held == newest and same(f.tensors(), used(w))
                assert f.wait(again.publish().number).hash == newest.hash


@pytest.mark.parametrize("content", [b"nothing of ours", None])
def test_a_publisher_s_file_of_anything_else_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "publisher.safetensors"
    if content is None:
        with publisher(weights(rows=3), state=path) as p:
            p.publish()
    else:
        path.write_bytes(content)
    with pytest.raises(InputError, match=str(path)):
        publisher(weights(), state=path)


def came(follower: Follower, version: int) -> bool:
    """Return whether a version is here; errors of the follower, and of its relay, are raised."""
    with suppress(LinkError):
        return bool(follower.wait(version, 0.05))
    return False


@pytest.mark.parametrize("relayed", [False, True])
def test_another_state_at_the_address_is_not_taken_for_the_one_that_is_followed(relayed: bool) -> None:
    first, other = Publisher({"w": torch.zeros(3)}, name="a"), {"w": torch.ones(3)}
    first.publish()
    own: dict[str, Any] = {"relay": (HOST, 0)} if relayed else {}
    with Follower(HOST, first.port, name="a", **own) as f:
        f.wait(1)
        first.close()
        with Publisher(other, port=first.port, name="b") as second:
            second.publish()
            with pytest.raises(InputError, match="publishes the state 'b', not 'a'; follow another address"):
                until(lambda: came(f, 2))
        assert f.held.number == 1 and f.held.hash == first.newest.hash


def test_the_name_of_a_state_is_held_against_publishers_and_stores(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with ShelfWriter.of(store, {"w": torch.zeros(3)}, name="policy") as writer:
        writer.publish()
    with Publisher({"w": torch.zeros(3)}, name="policy") as p:
        p.publish()
        for place in (store, f"{HOST}:{p.port}"):
            assert invoke("follow", place, "--once", "--name", "policy").exit_code == 0
            result = invoke("follow", place, "--once", "--name", "critic")
            assert result.exit_code == 2 and "the state 'policy', not 'critic'" in result.stderr


def test_a_publisher_goes_on_from_its_file_however_large_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.setattr(History.load.__func__, "__defaults__", (None, 100))  # type: ignore[attr-defined]
    state, file = {"w": torch.zeros(1000)}, tmp_path / "state"
    with Publisher(state, state=file) as p:
        p.publish()
    with Publisher(state, state=file) as p:
        assert p.newest.number == 1
