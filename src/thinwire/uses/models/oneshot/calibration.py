"""Statistics of norms for one configuration, and how good it is: without any training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.types import InputError, require
from thinwire.uses.models.oneshot.layers import PairedNorm
from thinwire.uses.models.oneshot.supernet import Configuration, Supernet


@torch.no_grad()
def recalibrate(net: Supernet, configuration: Configuration, batches: Iterable[Tensor]) -> None:
    """Set the statistics of the norms that a configuration uses to the means over batches of images.

    Those of training are of inputs that all kinds of paths gave. Errors: ``InputError`` without a batch.
    """
    seen = 0
    for seen, images in enumerate(batches, 1):
        with _norms(net, 1 / seen):
            net(images, configuration)
    require(seen > 0, InputError, "no images are given to calibrate with; give one batch or more")


@torch.no_grad()
def batch_loss(net: Supernet, configuration: Configuration, images: Tensor, classes: Tensor) -> float:
    """Return the cross-entropy of a configuration on a batch, normed by the batch; statistics stay."""
    with _norms(net, 0.0):
        return float(functional.cross_entropy(net(images, configuration), classes))


@torch.no_grad()
def accuracy(net: Supernet, configuration: Configuration, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the share of images that a configuration recognises, by the statistics it has."""
    right = many = 0
    net.eval()
    for images, classes in batches:
        right += int((net(images, configuration).argmax(1) == classes).sum())
        many += len(classes)
    require(many > 0, InputError, "no images are given to count with; give one batch or more")
    return right / many


@contextmanager
def _norms(net: Supernet, momentum: float) -> Iterator[None]:
    """Norm by the batch, which counts for as much in the statistics; then as before."""
    norms = [module for module in net.modules() if isinstance(module, PairedNorm)]
    was, training = [norm.momentum for norm in norms], net.training
    net.train()
    for norm in norms:
        norm.momentum = momentum
    try:
        yield
    finally:
        for norm, old in zip(norms, was, strict=True):
            norm.momentum = old
        net.train(training)
