"""Configurations without the method's search: from how much the loss rises with one layer at a time.

As allocation by sensitivity does, rises are added up over layers; the search need not assume that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from thinwire.choosing.allocate import ByteBudget, Site
from thinwire.uses.models.oneshot.calibration import batch_loss
from thinwire.uses.models.oneshot.supernet import Configuration, Supernet
from thinwire.uses.models.oneshot.training import Batch

Rises = list[list[float]]  # by layer and pair of widths
PRIOR = 1e-3  # of a rise: where none is measured, bits still go where they lower the rounding error most


def pairs(widths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs that a layer may have, bits of weights first."""
    return list(product(widths, widths))


def rises(net: Supernet, batch: Batch) -> Rises:
    """Return how far a batch's loss is above that of the widest path, one layer at a time.

    No rise is below zero, and of equal ones that of fewer bits is the larger.
    """
    widest = net.uniform(net.shape.widths[-1])
    least = batch_loss(net, widest, *batch)

    def one(i: int, pair: tuple[int, int]) -> float:
        rise = batch_loss(net, (*widest[:i], pair, *widest[i + 1 :]), *batch) - least
        return max(0.0, rise) + PRIOR * sum(4.0**-bits for bits in pair)

    return [[one(i, pair) for pair in pairs(net.shape.widths)] for i in range(len(widest))]


def sites(found: Rises, net: Supernet, cost: Callable[[Configuration], float]) -> list[Site]:
    """Return each layer's choices: rises against costs, which include what all choices cost, once a layer."""
    base = net.uniform(net.shape.widths[0])
    fixed = cost(base) * (len(base) - 1) / len(base)

    def spent(i: int, pair: tuple[int, int]) -> float:
        return cost((*base[:i], pair, *base[i + 1 :])) - fixed

    choices = pairs(net.shape.widths)
    return [Site(str(i), tuple(own), tuple(spent(i, p) for p in choices)) for i, own in enumerate(found)]


def sloped(found: Sequence[Site], budget: float, widths: Sequence[int]) -> Configuration:
    """Return the configuration of one slope for all layers."""
    return tuple(pairs(widths)[k] for k in ByteBudget(budget).choose(found))


def solved(found: Sequence[Site], budget: float, widths: Sequence[int]) -> Configuration:
    """Return the configuration of the least sum of rises: an integer linear programme, solved exactly."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    choices, layers = pairs(widths), len(found)
    costs = np.array([site.nbytes for site in found]).ravel()
    scale = float(costs.max())  # the solver's tolerances are absolute
    once = np.kron(np.eye(layers), np.ones(len(choices)))
    limits = [LinearConstraint(once, 1, 1), LinearConstraint(costs / scale, ub=budget / scale)]
    rise = np.array([site.costs for site in found]).ravel()
    solution = milp(rise, integrality=np.ones_like(rise), bounds=Bounds(0, 1), constraints=limits)
    assert solution.success, solution.message
    return tuple(choices[int(k)] for k in solution.x.reshape(layers, -1).argmax(1))
