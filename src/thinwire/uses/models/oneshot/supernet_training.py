"""Training of all widths at once: the widest path, then random ones that follow it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.uses.models.oneshot.quantiser import SharedConv, limits
from thinwire.uses.models.oneshot.supernet import Configuration, Supernet

Batch = tuple[Tensor, Tensor]  # images [B, ...] and classes [B]


Widths = tuple[int, ...]


def wavering(weight: Tensor, step: Tensor, bits: int) -> float:
    """Return the share of weights within an eighth of a step of an edge between two codes.

    >>> wavering(torch.tensor([0.0, 0.45, 0.55, 0.7]), torch.tensor(1.0), 3)
    0.5
    """
    low, high = limits(bits, signed=True)
    relative = weight.detach() / step
    edges = (relative - 0.5).round().clamp_(low, high - 1) + 0.5
    return float(((relative - edges).abs() < NEAR).float().mean())


def turbulence(layer: SharedConv, widths: Sequence[int]) -> float:
    """Return the mean over widths of the share of wavering weights over the bits."""
    found = [wavering(layer.weight, layer.weights.of(bits), bits) / bits for bits in widths]
    return sum(found) / len(found)


@dataclass(frozen=True)
class Freezing:
    """When layers are frozen, and how many. Times are shares of the training [code: of 150 epochs].

    >>> freezing = Freezing()
    >>> [round(freezing.ratio(t), 2) for t in (0.0, 0.5, 1.0)]
    [0.5, 0.35, 0.2]
    >>> freezing.candidates([0.1, 0.3, 0.2, 0.0], 0.5, (2, 3, 4))
    [(2, 3, 4), (3, 4), (3, 4), (2, 3, 4)]
    """

    most: float = 0.5  # of the layers, at first
    least: float = 0.2
    start: float = 5 / 150
    every: float = 2 / 150
    late: float = 0.72  # from here on more rarely
    late_every: float = 15 / 150

    def ratio(self, done: float) -> float:
        """Return the share of layers to freeze: along half a cosine."""
        return self.least + (self.most - self.least) * (1 + math.cos(math.pi * done)) / 2

    def due(self, step: int, steps: int) -> bool:
        """Return whether layers are chosen anew before this step."""
        done = step / steps
        every = max(1, round(steps * (self.every if done <= self.late else self.late_every)))
        return done > self.start and step % every == 0

    def candidates(self, turbulences: Sequence[float], ratio: float, widths: Widths) -> list[Widths]:
        """Return the widths of each layer's weights: the most turbulent lose the lowest, the others none."""
        by_rank = sorted(range(len(turbulences)), key=lambda i: -turbulences[i])
        frozen = set(by_rank[: int(len(by_rank) * ratio)]) if len(widths) > 1 else set[int]()
        return [widths[1:] if i in frozen else widths for i in range(len(turbulences))]


FREEZING = Freezing()


@torch.no_grad()
def chosen(
    layers: Sequence[SharedConv], held: Sequence[Widths], freezing: Freezing, done: float
) -> list[Widths]:
    """Return the candidates of all layers by how turbulent they are at those that they hold."""
    turbulences = [turbulence(layer, own) for layer, own in zip(layers, held, strict=True)]
    return freezing.candidates(turbulences, freezing.ratio(done), layers[0].widths)


@dataclass(frozen=True)
class TrainingMethod:
    """How a network is trained. With one width alone it is plain training at that width."""

    steps: int
    paths: int = 3  # random ones a step
    freezing: Freezing | None = FREEZING
    mitigation: float = 0.01  # weight of the distortion of layers at their lowest width; 0: without [code]
    rate: float = 0.04  # [code], as momentum, decay and the clipping of gradients
    step_rate: float = 1e-3  # the code's 1e-5 is for a hundred times the updates
    momentum: float = 0.9
    decay: float = 2.5e-5
    warm_up: float = 5 / 150  # of the training
    clip: float = 1.0

    def factor(self, step: int) -> float:
        """Return what rates are multiplied with at a step: a warm-up, then half a cosine."""
        warm = max(1, round(self.steps * self.warm_up))
        if step < warm:
            return (step + 1) / warm
        return (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm))) / 2


def drawn(candidates: Sequence[Widths], widths: Widths, draw: torch.Generator) -> Configuration:
    """Return a random configuration: weights by the candidates of their layer, inputs of any width."""

    def one(among: Sequence[int]) -> int:
        return among[int(torch.randint(len(among), (), generator=draw))]

    return tuple((one(own), one(widths)) for own in candidates)


def distortion(
    features: Sequence[Tensor],
    targets: Sequence[Tensor],
    configuration: Configuration,
    candidates: Sequence[Widths],
) -> Tensor:
    """Return how far layers whose weights are at their lowest width are from the widest path's.

    The sum over those layers of the mean squared difference of normed maps.
    """
    parts = zip(features, targets, configuration, candidates, strict=True)
    far = [functional.mse_loss(own, target) for own, target, (w, _), at in parts if w == min(at)]
    return torch.stack(far).sum() if far else torch.zeros(())


def path_loss(logits: Tensor, classes: Tensor, teacher: Tensor) -> Tensor:
    """Return the loss of a random path: half from the classes, half from the widest path's probabilities."""
    apart = functional.kl_div(logits.log_softmax(1), teacher, reduction="batchmean")
    return 0.5 * functional.cross_entropy(logits, classes) + 0.5 * apart


def learn(
    net: Supernet, batch: Batch, candidates: Sequence[Widths], method: TrainingMethod, draw: torch.Generator
) -> float:
    """Add up the gradients of one step, and return the loss of the widest path.

    That path learns from the classes; each random one half from them, half from the widest path's
    probabilities, and its distorted layers from that path's maps.
    """
    images, classes = batch
    logits, features = net.traced(images, net.uniform(net.shape.widths[-1]))
    loss = functional.cross_entropy(logits, classes)
    loss.backward()
    if len(net.shape.widths) == 1:
        return float(loss.detach())
    teacher, targets = logits.detach().softmax(1), [x.detach() for x in features]
    for _ in range(method.paths):
        configuration = drawn(candidates, net.shape.widths, draw)
        logits, features = net.traced(images, configuration)
        own = path_loss(logits, classes, teacher)
        if method.mitigation:
            own = own + method.mitigation * distortion(features, targets, configuration, candidates)
        own.backward()
    return float(loss.detach())


def train(
    net: Supernet,
    batches: Iterable[Batch],
    method: TrainingMethod,
    seed: int,
    told: Callable[[int, float, Sequence[Widths]], None] = lambda *_: None,
) -> None:
    """Train a network on the first ``method.steps`` of the batches.

    ``told`` gets each step, the loss of its widest path and the widths that each layer's weights have.
    """
    draw = torch.Generator().manual_seed(seed)
    optimisers, schedules = _optimisers(net, method)
    candidates: list[Widths] = [net.shape.widths] * len(net.layers)
    net.train()
    for step, batch in zip(range(method.steps), batches, strict=False):
        freezing = method.freezing
        if freezing is not None and freezing.due(step, method.steps):
            candidates = chosen(net.layers, candidates, freezing, step / method.steps)
        net.zero_grad()
        loss = learn(net, batch, candidates, method, draw)
        nn.utils.clip_grad_value_(net.parameters(), method.clip)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
        for steps in net.steps():
            steps.keep_positive()
        told(step, loss, candidates)


def _optimisers(
    net: Supernet, method: TrainingMethod
) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LambdaLR]]:
    """Return the optimiser of the weights, that of the steps, and how their rates change.

    Norms do not decay: those of pairs that a step does not draw would shrink unseen.
    """
    sizes = {id(steps.sizes) for steps in net.steps()}
    others = [p for p in net.parameters() if id(p) not in sizes]
    decaying = [p for p in others if p.dim() in (2, 4)]
    still = [p for p in others if p.dim() not in (2, 4)]
    groups: list[dict[str, Any]] = [{"params": decaying, "weight_decay": method.decay}, {"params": still}]
    sgd = torch.optim.SGD(groups, method.rate, momentum=method.momentum, nesterov=True)
    adam = torch.optim.Adam([p for p in net.parameters() if id(p) in sizes], method.step_rate)
    both: list[torch.optim.Optimizer] = [sgd, adam]
    return both, [torch.optim.lr_scheduler.LambdaLR(o, method.factor) for o in both]


NEAR = 1 / 8  # of a step to either side of an edge [code]
