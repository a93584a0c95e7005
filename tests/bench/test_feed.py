"""The bench of feeds: who begins with what, and measurements too short to say anything."""

from types import SimpleNamespace

import pytest
from histories import published

from bench import state_links, state_worker
from thinwire.types import MeasurementError


@pytest.mark.parametrize(("kind", "base"), [("one", False), ("relay", True), ("direct", False)])
def test_whoever_a_feed_s_publisher_talks_to_begins_with_a_keyframe(monkeypatch, tmp_path, kind, base):
    followers = [{"hash": "a", "arrivals": []}] * 8
    publish = {"hash": "a", "sent_first": 1, "sent": 2, "versions": [1]}
    orders = []

    class Cell:
        def __init__(self, link, place, order, control):
            orders.append(order)

        def run(self):
            network = {"uplink_bytes": 2}
            return {"network": network, "publish": publish, "follow": {"followers": followers}}

    monkeypatch.setattr(state_links, "Cell", Cell)
    assert state_links.feed(tmp_path, kind)["identical"]
    assert orders[0]["base"] is base
    publish["hash"] = "b"  # all alike, and none what was published
    assert not state_links.feed(tmp_path, kind)["identical"]


@pytest.mark.parametrize(("times", "arrived"), [([1.0, 2.0], 1), ([1.0, 2.0, 3.0], 0), ([1.0, 2.0, 2.0], 1)])
def test_a_measurement_too_short_to_say_anything_says_so(times, arrived):
    versions = [{"version": i, "published": t} for i, t in enumerate(times, 1)]
    with pytest.raises(MeasurementError, match="take longer"):
        state_links.summary({"publish": {"versions": versions}}, [{"age": 1.0}] * arrived, 0.5)


def test_the_bench_times_all_patches_that_are_made():
    history, _ = published(n=2)
    publishing = object.__new__(state_worker.Publishing)
    publishing._publisher, publishing._patches = SimpleNamespace(history=history), []
    publishing._watch_coding()
    assert history.patch(1, False).version == history.patch(None).version == 2
    assert [p["base"] for p in publishing._patches] == [1, 0]
