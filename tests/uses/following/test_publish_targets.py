"""One state, published to followers and to a store at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from following import LONG, small
from slow_proxy import SlowProxy
from waiting import HOST, until

from thinwire.types import InputError, LinkError
from thinwire.uses.following import publish_targets
from thinwire.uses.following.publish_targets import PublishTargets
from thinwire.uses.following.pull.store_reader import ShelfReader
from thinwire.uses.following.push.follower import Follower

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("zstandard")


def test_a_follower_and_a_store_get_the_same_versions(tmp_path: Path) -> None:
    w, store = small(1), tmp_path / "store"
    both = PublishTargets(dict(w), name="policy")
    try:
        both.listen(HOST, 0)
        both.keep(str(store))
        both.publish()
        both.replace({name: x + 1 for name, x in w.items()}, tmp_path)
        assert both.push is not None and both.newest.number == 2
        with pytest.raises(InputError, match="does not fit what is published: "):
            both.replace({"other": torch.zeros(3)}, tmp_path)
        with Follower(HOST, both.push.port, name="policy") as follower, ShelfReader(store) as reader:
            both.finish()
            for one in (follower, reader):
                one.wait(2, LONG)
                assert all(torch.equal(one.tensors()[name], x + 1) for name, x in w.items())
    finally:
        both.close()


@pytest.mark.parametrize("followed", [True, False])
def test_publishing_once_says_what_it_waited_for(followed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_targets, "PATIENCE", 0.5)
    w = small(400)
    both = PublishTargets(dict(w))
    both.listen(HOST, 0)
    push = both.push
    assert push is not None
    try:
        with SlowProxy(push.port, 20e3) as line, Follower(HOST, line.port if followed else 1):
            if followed:
                until(lambda: any(f.greeted for f in push.followers))
            line.rate = 4e3
            both.publish()
            with pytest.raises(LinkError, match="holds version 0" if followed else "nobody follows"):
                both.finish()
    finally:
        both.close()
