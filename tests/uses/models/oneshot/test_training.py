"""All widths are trained at once: what a step learns from, and that 120 steps learn scanned digits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from thinwire.runs.data import digits
from thinwire.types import InputError
from thinwire.uses.models.oneshot.supernet import (
    WIDTHS,
    Shape,
    Supernet,
    accuracy,
    batch_loss,
    costs_of,
    recalibrate,
)
from thinwire.uses.models.oneshot.supernet_training import TrainingMethod, distortion, drawn, learn, train
from thinwire.uses.models.oneshot.width_search import Search

BUDGETS = (2.3, 3.2, 5.0)  # bits a weight
TINY = Shape(channels=(4, 8), stride=1, widths=(2, 3, 4))


def scans() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return digits to train on, and every fifth, held out."""
    pytest.importorskip("sklearn")
    x, y = digits.load_digits()
    test = torch.arange(len(y)) % 5 == 4
    return (x[~test], y[~test]), (x[test], y[test])


def batches(x: Tensor, y: Tensor, size: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(len(y), (size,), generator=draw)
        yield x[chosen], y[chosen]


def some() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(16, 1, 8, 8, generator=draw), torch.randint(10, (16,), generator=draw)


def test_paths_are_drawn_from_the_candidates_of_each_layer() -> None:
    candidates, draw = [(2, 3, 4), (3, 4), (4,)], torch.Generator().manual_seed(0)
    found = [drawn(candidates, (2, 3, 4), draw) for _ in range(200)]
    for i, own in enumerate(candidates):
        assert {c[i][0] for c in found} == set(own) and {c[i][1] for c in found} == {2, 3, 4}


def test_a_step_adds_up_the_gradients_of_the_widest_path_and_of_random_ones() -> None:
    """Against the losses written out: cross-entropy; half of it, half the divergence, and distortion."""
    batch, method = some(), TrainingMethod(steps=1, paths=2)
    net, same = Supernet(TINY, 0), Supernet(TINY, 0)
    candidates = [TINY.widths] * len(net.layers)
    learn(net, batch, candidates, method, torch.Generator().manual_seed(3))
    draw = torch.Generator().manual_seed(3)
    logits, features = same.traced(batch[0], same.uniform(4))
    loss = functional.cross_entropy(logits, batch[1])
    teacher, targets = logits.detach().softmax(1), [x.detach() for x in features]
    for _ in range(2):
        configuration = drawn(candidates, TINY.widths, draw)
        own, maps = same.traced(batch[0], configuration)
        apart = (teacher * (teacher.log() - own.log_softmax(1))).sum(1).mean()
        lowest = [
            (a - b).square().mean()
            for a, b, (w, _) in zip(maps, targets, configuration, strict=True)
            if w == 2
        ]
        loss = loss + 0.5 * functional.cross_entropy(own, batch[1]) + 0.5 * apart + 0.01 * sum(lowest)
    loss.backward()
    for (name, a), b in zip(net.named_parameters(), same.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad, b.grad, atol=1e-5), name


def test_distortion_is_of_layers_at_their_lowest_width_alone() -> None:
    maps, targets = [torch.ones(2, 3), torch.full((2, 3), 5.0)], [torch.zeros(2, 3)] * 2
    widths = [(2, 3), (2, 3)]
    assert float(distortion(maps, targets, ((2, 3), (3, 2)), widths)) == 1
    assert float(distortion(maps, targets, ((3, 2), (3, 2)), widths)) == 0
    assert float(distortion(maps, targets, ((3, 2), (3, 2)), [(2, 3), (3,)])) == 25, "frozen: its lowest is 3"


def test_recalibration_takes_the_means_of_its_batches_and_losses_leave_no_trace() -> None:
    net, (x, y) = Supernet(TINY, 0), some()
    recalibrate(net, net.uniform(3), x.split(4))
    known = {name: value.clone() for name, value in net.state_dict().items()}
    batch_loss(net, net.uniform(3), x, y)
    assert all(torch.equal(value, known[name]) for name, value in net.state_dict().items())
    whole = net.stem.inputs(x, 8), net.stem.weights(net.stem.weight, 8)
    maps = functional.conv2d(whole[0], whole[1], padding=1)
    assert torch.allclose(net.stem.norm.mean[0, 0], maps.mean((0, 2, 3)), atol=1e-5)
    with pytest.raises(InputError, match="no images"):
        recalibrate(net, net.uniform(3), [])


def test_120_steps_learn_digits_at_every_width_and_serve_budgets() -> None:
    (x, y), held_out = scans()
    shape = Shape(channels=(8, 16))
    net, method, frozen = Supernet(shape, 0), TrainingMethod(120, paths=2), set[int]()

    def note(_: int, loss: float, candidates: object) -> None:
        assert loss < 5
        frozen.update(i for i, own in enumerate(candidates) if own[0] > 2)  # type: ignore[call-overload]

    train(net, batches(x, y, 48), method, 0, note)
    assert len(frozen) > 1
    for bits in WIDTHS:
        recalibrate(net, net.uniform(bits), x[:512].split(256))
        assert accuracy(net, net.uniform(bits), [held_out]) > (0.9 if bits > 2 else 0.8), bits
    costs, chosen = costs_of(net, 8), set()
    for bits in BUDGETS:
        budget = costs.fixed_nbytes + sum(costs.weights) * bits / 8
        error = lambda c, move: batch_loss(net, c, x[:64], y[:64])  # noqa: E731
        found = Search(WIDTHS, 5, error, costs.nbytes).within(budget, len(net.layers))
        recalibrate(net, found, x[:512].split(256))
        assert costs.nbytes(found) <= budget and accuracy(net, found, [held_out]) > 0.85
        chosen.add(found)
    assert len(chosen) == len(BUDGETS)


def test_one_width_alone_is_plain_training() -> None:
    net, (x, y) = Supernet(replace(TINY, widths=(3,)), 0), some()
    train(net, iter([(x, y)] * 60), TrainingMethod(60), 0)
    assert batch_loss(net, net.uniform(3), x, y) < 1.0


def test_training_is_the_same_twice() -> None:
    def trained() -> dict[str, Tensor]:
        net = Supernet(TINY, 5)
        train(net, iter([some()] * 4), TrainingMethod(4), 7)
        return net.state_dict()

    first, second = trained(), trained()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_widths_in_no_order_are_refused() -> None:
    with pytest.raises(InputError, match="give each once, from 2 bits, the smallest first"):
        Shape(widths=(4, 2))
