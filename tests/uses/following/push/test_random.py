"""Publisher, relay and followers under random faults: each version held was published, none is older."""

from __future__ import annotations

import random
from pathlib import Path
from time import sleep

import pytest
from following import publisher, same, train, used, weights
from slow_proxy import SlowProxy
from torch import Tensor
from waiting import HOST, until

from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.state_relay import StateRelay


@pytest.mark.parametrize(("seed", "versions", "relayed"), [(0, 200, 0), (1, 25, 0), (2, 25, 0), (3, 60, 1)])
def test_whatever_happens_each_version_held_is_one_that_was_published_and_none_is_older(
    seed: int, versions: int, relayed: int, tmp_path: Path
) -> None:
    """Cuts, stalls, restarts of either side, or of a relay between them, and late joiners, at random."""
    rng, w, path = random.Random(seed), weights(seed, rows=200), tmp_path / "state.safetensors"
    published: dict[int, dict[str, Tensor]] = {}  # by hash
    p = publisher(w, silence=2.0)
    port, line = p.port, SlowProxy(p.port, 3e5)
    relays = [StateRelay(HOST, line.port, (HOST, 0)) for _ in range(relayed)]
    near = relays[0].port if relays else line.port
    f = Follower(HOST, near, state=path)
    last, others = (0, 0), []

    def publish() -> None:
        train(w, 10.0 ** rng.uniform(-5, -2))
        published[p.publish().hash] = used(w)

    def look() -> None:
        nonlocal last
        if not f.held.hash:
            return
        tensors = f.tensors()
        assert same(tensors, published[f.replica.hash])
        now = f.replica.version, list(published).index(f.replica.hash)  # whatever contents are called
        assert now[0] >= last[0] and now[1] >= last[1]
        last = now

    while len(published) < versions:
        what = rng.choices(
            ["publish", "look", "cut", "restore", "publisher", "follower", "joiner", "relay"],
            [9, 4, 2, 3, 1, 1, 1, relayed],
        )
        if what == ["publish"]:
            publish()
        elif what == ["cut"]:
            line.cut()
        elif what == ["restore"]:
            line.restore()
        elif what == ["publisher"]:
            p.close()
            state = rng.choice(
                [None, tmp_path / "publisher.safetensors"]
            )  # which may be of a life before the last
            p = publisher(w, port=port, silence=2.0, state=state)
            publish()
        elif what == ["follower"]:
            f.close()
            f = Follower(HOST, near, state=path)
        elif what == ["relay"]:
            relays.pop().close()
            held: dict[str, object] = {"base": rng.choice([None, *published.values()])}
            held = {"state": path} if rng.random() < 0.5 else held  # the base may be of any life
            relays.append(StateRelay(HOST, line.port, (HOST, near), **held))  # type: ignore[arg-type]
        elif what == ["joiner"] and len(others) < 3:
            others.append(Follower(HOST, port))
        look()
        sleep(rng.uniform(0, 0.03))
    line.restore()
    publish()
    newest = p.newest.hash
    for follower in [f, *others]:
        until(lambda follower=follower: follower.held.hash == newest)
        assert same(follower.tensors(), used(w))
        follower.close()
    for relay in relays:
        relay.close()
    p.flush()  # one that left while it was cut off counts until it has been silent for a while
    p.close()
    line.__exit__()
