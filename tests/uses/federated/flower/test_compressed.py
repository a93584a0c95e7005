"""Flower's strategies over compressed messages: the same where nothing is dropped, and nothing is lost."""

from __future__ import annotations

import copy
from collections import defaultdict
from itertools import pairwise
from time import monotonic
from typing import Any

import pytest
import torch
from each import each
from flower_apps import (
    NODES,
    RATE,
    REASON,
    STEPS,
    Computed,
    Losing,
    accuracy,
    client_app,
    example,
    initial,
    local_grid,
    row,
    train_config,
)
from torch import Tensor, nn

from thinwire.channels.references import under
from thinwire.codecs import Codec, Raw, TopK, Uniform
from thinwire.rounds.aggregation_server import Rejected
from thinwire.rounds.client_profile import Fixed
from thinwire.rounds.download import DeltaDownload, Download, FullDownload
from thinwire.rounds.local_training import Decay
from thinwire.rounds.update_messages import Update
from thinwire.types import InputError
from thinwire.uses.federated.flower.local_grid import LocalGrid
from thinwire.uses.federated.flower.mod import compression_mod
from thinwire.uses.federated.flower.records import UPDATE, payload, replaced
from thinwire.uses.federated.flower.strategy import Compressed

strategies = pytest.importorskip("flwr.serverapp.strategy", reason=REASON)
flwr = pytest.importorskip("flwr.app", reason=REASON)

FINE = Uniform(4, group=64)
SPARSE = TopK(0.05, FINE)


def averaging(**options: Any) -> Any:
    return strategies.FedAvg(**{"fraction_evaluate": 0.0, "min_train_nodes": 3, **options})


def compressed(codec: Codec, strategy: Any = None, download: Download | None = None) -> Compressed:
    return Compressed(strategy or averaging(), Fixed(STEPS, codec), download, rates=Decay(RATE))


def plain(rounds: int, strategy: Any = None, fit: Any = None, arrays: Any = None) -> Any:
    """Return what Flower makes of it without us."""
    grid = local_grid(lambda message, context, call_next: call_next(message, context), fit=fit)
    found = (strategy or averaging()).start(grid, arrays or initial(), rounds, train_config=train_config())
    return found, grid


@each("codec", [Raw(), TopK(1.0)])
def test_with_all_values_it_is_flowers_own_average(codec: Codec, figures: dict[str, Any]) -> None:
    """But for the rounding of start - (start - end), which is half a unit in the last place of a weight."""
    wanted, _ = plain(rounds=3)
    found = compressed(codec).start(local_grid(), initial(), num_rounds=3)
    a, b = row(wanted.arrays), row(found.arrays)
    assert not torch.equal(a, row(initial()))
    torch.testing.assert_close(a, b, rtol=0, atol=3e-7)
    for number, metrics in wanted.train_metrics_clientapp.items():
        assert found.train_metrics_clientapp[number] == pytest.approx(metrics, rel=1e-5)
    figures.setdefault("largest_difference_from_fedavg", {})[str(codec)] = float((a - b).abs().max())


def test_it_learns_as_well_for_a_fraction_of_the_bytes(figures: dict[str, Any]) -> None:
    wanted, whole = plain(rounds=20)
    coded, grid = compressed(SPARSE, download=DeltaDownload(TopK(0.1, FINE))), local_grid()
    found = coded.start(grid, initial(), num_rounds=20)
    assert accuracy(wanted.arrays) > accuracy(initial()) + 0.3
    assert accuracy(found.arrays) > accuracy(wanted.arrays) - 0.03
    assert grid.up < whole.up / 20
    assert grid.down < whole.down / 10
    figures["bytes"] = {
        "rounds": 20,
        "nodes": len(NODES),
        "values": row(initial()).numel(),
        "codecs": {"up": str(SPARSE), "down": str(TopK(0.1, FINE))},
        "FedAvg": {"up": whole.up, "down": whole.down, "accuracy": round(accuracy(wanted.arrays), 4)},
        "Compressed(FedAvg)": {
            "up": grid.up,
            "down": grid.down,
            "accuracy": round(accuracy(found.arrays), 4),
        },
    }


@each("download", [FullDownload(), DeltaDownload()])
def test_what_was_computed_is_applied_or_kept_in_the_state(download: Download) -> None:
    """Whatever replies are lost on the way."""
    computed, applied = Computed(), defaultdict(lambda: torch.zeros(1, dtype=torch.float64))
    strategy, grid = (
        compressed(SPARSE, download=download),
        Losing(client_app(compression_mod, computed), NODES),
    )
    took = Compressed._decode

    class Noting(Compressed):
        def _decode(self, reply: Any, change: Tensor) -> None:
            node = reply.metadata.src_node_id
            applied[node] = applied[node] + change.double()
            took(self, reply, change)

    strategy.__class__ = Noting
    strategy.start(grid, initial(), num_rounds=8)  # in the seventh the node is asked once more
    assert grid.times == 0
    for node, context in grid.contexts.items():
        client = strategy._nodes.ids[node]  # type: ignore[union-attr]
        kept = {
            n: torch.from_numpy(a.numpy()) for n, a in under(context.state["thinwire"], "residuals.").items()
        }
        left = kept[f"sender.{client}.0"].view(torch.float32).reshape(1, -1).double()
        torch.testing.assert_close(applied[node] + left, computed.total[node], rtol=0, atol=1e-5)
        assert left.abs().sum() > 0
    assert strategy.refused == []


class Forgetful(LocalGrid):
    """A grid whose first node loses its state before a message, as when it is started again."""

    pushed = 0

    def push_messages(self, messages: Any) -> list[str]:
        self.pushed += 1
        if self.pushed == 5:  # Flower sends once to train and once, nothing here, to evaluate
            del self.contexts[5]
        return super().push_messages(messages)


def test_a_node_that_lost_its_state_is_sent_the_whole() -> None:
    strategy, grid = (
        compressed(SPARSE, download=DeltaDownload()),
        Forgetful(client_app(compression_mod), NODES),
    )
    downs = []
    strategy.start(grid, initial(), 5, evaluate_fn=lambda number, arrays: downs.append(grid.down))
    reason = "this node holds no version to lead on from; send the whole"
    assert strategy.refused == [Rejected(strategy._opened.ids[5], reason)]
    begun, *more = (b - a for a, b in pairwise(downs))
    whole = begun / 3
    assert [round(down / whole) for down in more] == [0, 0, 1, 0]


def test_a_message_that_comes_twice_is_answered_once() -> None:
    def twice(message: Any, context: Any, call_next: Any) -> Any:
        call_next(copy.deepcopy(message), context)
        return call_next(message, context)

    strategy = compressed(SPARSE)
    strategy.start(local_grid(twice, compression_mod), initial(), num_rounds=1)
    reason = "update 1 was made already, and 1 is the last; ask for another"
    assert [r.reason for r in strategy.refused] == [reason] * 3


def test_errors_of_the_server_itself_are_the_strategys() -> None:
    """Flower answers with its own node's id where it cannot read what a node sent."""

    class Broken(LocalGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
            found = super().send_and_receive(messages, timeout=timeout)
            error = flwr.Message(flwr.Error(3, "gone"), reply_to=found[0]) if found else None
            return [error, *found[1:]] if error else []

    strategy = compressed(Raw())
    found = strategy.start(Broken(client_app(compression_mod), NODES), initial(), num_rounds=2)
    assert strategy.server.version == 2 and not torch.equal(row(found.arrays), row(initial()))
    assert min(strategy.server.traffic(client).updates for client in range(3)) < 2


def spoiled(reply: Any, **change: Any) -> Any:
    """Return the reply with another update in it."""
    old = Update.unpack(reply.content["arrays"][UPDATE].data)
    values = {
        name: getattr(old, name) for name in ("client", "sequence", "version", "samples", "steps", "packet")
    }
    data = change.pop("data", None) or Update(**{**values, **change}).pack()
    reply.content = replaced(reply.content, {"arrays": flwr.ArrayRecord({UPDATE: payload(data)})})
    return reply


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"client": 7}, "bears the id of client 7"),
        ({"sequence": 99}, "was not asked for"),
        ({"version": 5}, "it starts from version 5"),
        ({"samples": 0}, "trained on 0 samples"),
        ({"data": b"nonsense"}, "not an update"),
    ],
)
def test_a_hostile_reply_is_not_aggregated(change: dict[str, Any], words: str) -> None:
    def hostile(message: Any, context: Any, call_next: Any) -> Any:
        reply = call_next(message, context)
        return spoiled(reply, **dict(change)) if context.node_id == 11 else reply

    strategy = compressed(Raw())
    found = strategy.start(local_grid(hostile, compression_mod), initial(), num_rounds=1)
    assert len(strategy.refused) == 1 and words in strategy.refused[0].reason
    honest = compressed(Raw(), averaging(min_train_nodes=2))
    grid = local_grid()
    grid.nodes = {n: c for n, c in NODES.items() if n != 11}
    wanted = honest.start(grid, initial(), num_rounds=1)
    assert torch.equal(row(found.arrays), row(wanted.arrays))


def test_a_diverging_node_says_so_and_the_others_go_on() -> None:
    fit = example("client_app").fit

    def diverging(message: Any, context: Any) -> Any:
        reply = fit(message, context)
        if context.node_id == 5:
            state = {k: v * float("nan") for k, v in reply.content["arrays"].to_torch_state_dict().items()}
            reply.content["arrays"] = flwr.ArrayRecord(state)
        return reply

    strategy = compressed(SPARSE)
    found = strategy.start(local_grid(fit=diverging), initial(), num_rounds=2)
    assert len(strategy.refused) == 2 and "NaN" in strategy.refused[0].reason
    assert row(found.arrays).isfinite().all()


def test_a_client_without_the_mod_is_told_what_to_do() -> None:
    def echo(message: Any, context: Any) -> Any:
        metrics = flwr.MetricRecord({"num-examples": 1})
        content = flwr.RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return flwr.Message(content, reply_to=message)

    strategy = compressed(Raw())
    strategy.start(local_grid(lambda m, c, call_next: call_next(m, c), fit=echo), initial(), num_rounds=1)
    assert {r.reason for r in strategy.refused} == {
        "it has no update; let compression_mod be the app's first mod"
    }


@each(
    "make",
    [
        lambda: strategies.FedAvgM(fraction_evaluate=0.0, min_train_nodes=3, server_momentum=0.5),
        lambda: strategies.FedAdam(fraction_evaluate=0.0, min_train_nodes=3, eta=0.01),
        lambda: strategies.FedMedian(fraction_evaluate=0.0, min_train_nodes=3),
        lambda: strategies.FedProx(fraction_evaluate=0.0, min_train_nodes=3, proximal_mu=0.1),
    ],
)
def test_any_strategy_makes_of_it_what_it_makes_without(make: Any) -> None:
    wanted, _ = plain(rounds=2, strategy=make())
    found = compressed(Raw(), make()).start(local_grid(), initial(), num_rounds=2)
    torch.testing.assert_close(row(found.arrays), row(wanted.arrays), rtol=0, atol=1e-4)


def test_evaluations_are_of_the_version_that_clients_hold() -> None:
    seen: list[Tensor] = []

    def evaluate(message: Any, context: Any) -> Any:
        seen.append(row(message.content["arrays"]))
        metrics = flwr.MetricRecord({"num-examples": 1, "norm": float(seen[-1].norm())})
        return flwr.Message(flwr.RecordDict({"metrics": metrics}), reply_to=message)

    app = client_app(compression_mod)
    app.evaluate()(evaluate)
    grid = local_grid()
    grid.app = app
    strategy = compressed(SPARSE, averaging(fraction_evaluate=1.0, min_evaluate_nodes=3), DeltaDownload())
    found = strategy.start(grid, initial(), num_rounds=3)
    assert len(seen) == 9 and strategy.refused == []
    assert all(torch.equal(x, strategy.server.given) for x in seen[-3:])
    assert set(found.evaluate_metrics_clientapp) == {1, 2, 3}
    assert grid.down < 12 * row(initial()).numel()  # each node once whole, then deltas


class Normed(nn.Sequential):
    """A network with counters and running means, which Flower averages as it does weights."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def test_arrays_of_other_types_travel_whole() -> None:
    torch.manual_seed(3)
    model, task = Normed(), example("task")
    arrays = flwr.ArrayRecord(model.state_dict())

    def fit(message: Any, context: Any) -> Any:
        own, (x, y) = Normed(), task.samples(context.node_config["partition-id"])
        own.load_state_dict(message.content["arrays"].to_torch_state_dict())
        task.train(own, x, y, 3, 0.1)
        metrics = flwr.MetricRecord({"num-examples": len(y)})
        content = flwr.RecordDict({"arrays": flwr.ArrayRecord(own.state_dict()), "metrics": metrics})
        return flwr.Message(content, reply_to=message)

    wanted, _ = plain(2, fit=fit, arrays=arrays)
    found = compressed(Raw()).start(local_grid(fit=fit), arrays, num_rounds=2)
    a, b = (x.arrays.to_torch_state_dict() for x in (wanted, found))
    assert a["1.num_batches_tracked"] == b["1.num_batches_tracked"] == 6
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-6)


@each("download", [FullDownload(), DeltaDownload()])
@each("codec", [TopK(0.1, FINE), Raw()])
def test_what_is_no_gradient_step_goes_whole(download: Download, codec: Codec) -> None:
    """Running means and variances are Flower's own averages, whatever is dropped of the weights."""
    torch.manual_seed(3)
    arrays, seen = flwr.ArrayRecord(Normed().state_dict()), []
    task = example("task")

    def fit(message: Any, context: Any) -> Any:
        own, (x, y) = Normed(), task.samples(context.node_config["partition-id"])
        own.load_state_dict(message.content["arrays"].to_torch_state_dict())
        task.train(own, x, y, 3, 0.1)
        seen.append((len(y), own.state_dict()))
        metrics = flwr.MetricRecord({"num-examples": len(y)})
        content = flwr.RecordDict({"arrays": flwr.ArrayRecord(own.state_dict()), "metrics": metrics})
        return flwr.Message(content, reply_to=message)

    found = compressed(codec, download=download).start(local_grid(fit=fit), arrays, num_rounds=4)
    last, made = seen[-3:], found.arrays.to_torch_state_dict()
    for name in ("1.running_mean", "1.running_var"):
        wanted = sum(n * state[name] for n, state in last) / sum(n for n, _ in last)
        torch.testing.assert_close(made[name].float(), wanted, rtol=0, atol=1e-5)
    assert float(made["1.running_var"].min()) > 0


class Hanging(LocalGrid):
    """A grid that never has a reply of its first node, and counts the messages to it."""

    asked = 0

    def pull_messages(self, message_ids: Any) -> list[Any]:
        dead = [n for n in message_ids if self._pending[n][0].metadata.dst_node_id == 5]
        return super().pull_messages([n for n in message_ids if n not in dead])

    def push_messages(self, messages: Any) -> list[str]:
        every = list(messages)
        self.asked += sum(m.metadata.dst_node_id == 5 for m in every)
        return super().push_messages(every)


def test_a_node_that_never_answers_is_asked_more_seldom_and_a_quorum_does_not_wait() -> None:
    strategy = Compressed(averaging(), Fixed(STEPS, SPARSE), rates=Decay(RATE), quorum=0.6)
    grid = Hanging(client_app(compression_mod), NODES)
    began = monotonic()
    found = strategy.start(grid, initial(), num_rounds=8, timeout=60)
    assert grid.asked == 3 and monotonic() - began < 30  # in rounds 1, 3 and 7
    assert accuracy(found.arrays) > accuracy(initial())


def test_what_cannot_be_compressed_is_refused_in_one_sentence() -> None:
    with pytest.raises(InputError, match="has no float32 array to compress"):
        compressed(Raw()).start(local_grid(), flwr.ArrayRecord({"a": payload(b"trees")}), num_rounds=1)
    with pytest.raises(InputError, match="no round has begun; call start first"):
        _ = compressed(Raw()).server
