"""Asynchronous rules over Flower's grid: late updates, periods, nodes that come, fail, or never answer."""

from __future__ import annotations

from time import monotonic
from typing import Any

import numpy as np
import pytest
from each import each
from flower_apps import NODES, RATE, REASON, STEPS, accuracy, client_app, example, initial, local_grid

from thinwire.codecs import TopK, Uniform
from thinwire.rounds.aggregation import FedAsync, FedBuff, Periodic
from thinwire.rounds.client_profile import Fixed
from thinwire.rounds.download import DeltaDownload
from thinwire.rounds.local_training import Decay
from thinwire.types import LinkError, ThinwireError
from thinwire.uses.federated.flower import asynchronous as loop
from thinwire.uses.federated.flower import flwr_names
from thinwire.uses.federated.flower.asynchronous import Asynchronous
from thinwire.uses.federated.flower.local_grid import LocalGrid
from thinwire.uses.federated.flower.mod import compression_mod
from thinwire.uses.federated.recipes import Method

flwr = pytest.importorskip("flwr.app", reason=REASON)
serverapp = pytest.importorskip("flwr.serverapp", reason=REASON)

SPARSE = Fixed(STEPS, TopK(0.05, Uniform(4, group=64)))
SLOW = {8: 5}  # its answer takes five looks


def asynchronous(rule: Any) -> Asynchronous:
    return Asynchronous(Method(rule, DeltaDownload(), feedback=True), SPARSE, Decay(RATE))


@each("rule", [FedBuff(2), FedAsync(0.5), Periodic(0.02)])
def test_every_rule_learns_with_a_slow_node(rule: Any) -> None:
    grid, made = local_grid(pulls=SLOW), []
    run = asynchronous(rule).start(grid, initial(), 20, poll=0.005, made=lambda n, arrays: made.append(n))
    assert made == list(range(1, run.server.version + 1)) and run.server.version >= 20
    assert run.refused == []
    assert accuracy(run.arrays) > accuracy(initial()) + 0.2
    slow, quick = (run.server.traffic(run.nodes.ids[node]) for node in (8, 5))
    assert 0 < slow.updates < quick.updates
    assert slow.staleness / slow.updates > quick.staleness / quick.updates


def test_runs_of_a_server_app_are_equal() -> None:
    found: list[bytes] = []
    app = serverapp.ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        run = asynchronous(FedBuff(2)).start(grid, initial(), 6, poll=0.0)
        found.append(b"".join(a.numpy().tobytes() for a in run.arrays.values()))

    for _ in range(2):
        grid = local_grid(pulls=SLOW)
        app(grid, None)
    assert found[0] == found[1]


def test_a_node_may_come_late() -> None:
    grid = local_grid()
    grid.nodes = {5: NODES[5]}

    def made(number: int, arrays: Any) -> None:
        if number == 2:
            grid.nodes = NODES

    run = asynchronous(FedAsync()).start(grid, initial(), 2, made=made)
    assert set(run.nodes.ids) == {5}
    while run.server.version < 20:
        run._looked = 0.0  # look for nodes at once
        run.step()
    assert set(run.nodes.ids) == set(NODES)
    assert min(run.server.traffic(c).updates for c in run.server.clients) > 0


def failing(*nodes: int) -> Any:
    fit = example("client_app").fit

    def train(message: Any, context: Any) -> Any:
        if context.node_id in nodes:
            raise ValueError("no such file")
        return fit(message, context)

    return train


def test_a_node_that_fails_twice_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOOK", 0.0)
    run = asynchronous(FedBuff(2)).start(local_grid(fit=failing(5)), initial(), 6)
    assert [(r.client, "no such file" in r.reason) for r in run.refused] == [(run.nodes.ids[5], True)] * 2


def test_a_node_that_is_gone_is_asked_again_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOOK", 0.0)

    class Flaky(LocalGrid):
        """The SuperLink answers for a node that is gone, in its own name, for the first few messages."""

        gone = 3

        def pull_messages(self, message_ids: Any) -> list[Any]:
            found = super().pull_messages(message_ids)
            for i, reply in enumerate(found):
                if reply.metadata.src_node_id == 5 and self.gone:
                    self.gone -= 1
                    found[i] = flwr_names.failed(reply, "node unavailable", code=5)
                    found[i].metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
            return found

    run = asynchronous(FedBuff(2)).start(Flaky(client_app(compression_mod), NODES), initial(), 12)
    assert [r.reason for r in run.refused] == ["node unavailable"] * 3
    assert run.server.traffic(run.nodes.ids[5]).updates > 0


def test_where_all_fail_the_run_ends_with_the_reason() -> None:
    begun = monotonic()
    with pytest.raises(
        ThinwireError, match=r"all nodes failed 2 times in a row, node .* last: .*no such file"
    ):
        asynchronous(FedBuff(2)).start(local_grid(fit=failing(*NODES)), initial(), 6, poll=0.01)
    assert monotonic() - begun < 10


def test_where_nobody_answers_the_run_ends_and_names_the_nodes() -> None:
    grid = local_grid(pulls=dict.fromkeys(NODES, 10**9))
    with pytest.raises(LinkError, match=r"no node answered in 0.2 s; known nodes: 5, 8, 11"):
        asynchronous(FedBuff(2)).start(grid, initial(), 6, timeout=0.2, poll=0.01)


@each("rule", [FedBuff(2), FedAsync(0.5)])
def test_what_travels_whole_is_averaged_over_a_version(rule: Any) -> None:
    """A running variance and a count, which an app moves by its own node, start from the newest version's."""
    starts, first = [], flwr.ArrayRecord({**initial(), "a.running_var": flwr.Array(np.ones(3, np.float32))})
    first["count"] = flwr.Array(np.zeros((), np.int64))
    inner = example("client_app").fit

    def fit(message: Any, context: Any) -> Any:
        arrays = message.content["arrays"]
        before, count = arrays["a.running_var"].numpy(), arrays["count"].numpy()
        starts.append(float(before[0]))
        del arrays["a.running_var"], arrays["count"]
        reply = inner(message, context)
        reply.content["arrays"]["a.running_var"] = flwr.Array(before + np.float32(context.node_id))
        reply.content["arrays"]["count"] = flwr.Array(np.asarray(count + 1))
        return reply

    run = asynchronous(rule).start(local_grid(fit=fit), first, 6, poll=0.005)
    moved = run.arrays["a.running_var"].numpy()
    assert run.refused == [] and len(set(starts)) > 1 and min(starts) == 1.0
    assert min(moved) > max(3.0, max(starts[:3])) and int(run.arrays["count"].numpy()) > 1
