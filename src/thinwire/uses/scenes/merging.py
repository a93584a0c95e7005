"""A scene of fewer splats: neighbours become one that has their moments.

Pairs of neighbours that cost least merge first, a round of pairs at a time. Source: pairwise merging as in
NanoGS, arXiv 2603.16103 [second-hand]; the cost is Ward's (J. H. Ward, 1963) over places and colours.
Dropping splats instead leaves holes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from thinwire.uses.scenes.code import orientations
from thinwire.uses.scenes.code.morton import PositionGrid, morton
from thinwire.uses.scenes.scene import Array, Splats
from thinwire.uses.scenes.view.project import rotation_matrices

NEAR = 6  # places on the curve at which a splat looks for its neighbour
DEPTH = 12
COLOUR, PLACE = 2.8, 0.01  # units of cost: a constant coefficient of 1 / COLOUR, and a share of the radius
FAR = 16.0  # radii: splats farther out are in the order as if they were there
SHARE = 0.6  # of a round's pairs that merge
LEAST_ALPHA, MOST_ALPHA = 0.02, 0.995
FLOOR = 1e-12  # of a variance
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def merged(splats: Splats, weights: Floats, radius: float, count: int) -> Splats:
    """Return a scene of ``count`` splats, or as many as there are, that looks like this one from afar.

    ``weights`` [n] say how much of each splat is seen; ``radius`` is the frame's.

    >>> pair = Splats.of([[0, 0, 0], [1, 0, 0]], opacities=[9, 9])
    >>> merged(pair, np.ones(2), 1.0, 1).positions.tolist()
    [[0.5, 0.0, 0.0]]
    """
    return next(merged_more(splats, weights, radius, [count]))


def merged_more(splats: Splats, weights: Floats, radius: float, counts: Sequence[int]) -> Iterator[Splats]:
    """Yield what ``merged`` returns for each of falling ``counts``."""
    mass = weights + 1e-6 * max(float(weights.max()), 1e-300)
    places = splats.positions.astype(np.float64)
    features = np.concatenate([places / (PLACE * radius), COLOUR * splats.colours.astype(np.float64)], axis=1)
    middle = np.median(places, axis=0)
    near = np.clip(places, middle - FAR * radius, middle + FAR * radius)  # or strays would be all the order
    for group in _groups(near, features, mass, counts):
        whole = int(group.max()) + 1 == splats.count
        yield splats if whole else _moments(splats, mass, group)


def _groups(places: Floats, features: Floats, mass: Floats, counts: Sequence[int]) -> Iterator[Ints]:
    """Yield the group [n] of each splat, 0 to count - 1, for each of falling ``counts``."""
    joined, own, draw = np.arange(len(mass)), np.arange(len(mass)), np.random.default_rng(0)
    mass = mass.copy()
    for count in counts:
        while len(mass) > max(count, 1):
            order = _along(places, draw)
            places, features, mass, own = places[order], features[order], mass[order], own[order]
            first, second = _pairs(features, mass, len(mass) - max(count, 1))
            total = (mass[first] + mass[second])[:, None]
            for values in (places, features):
                values[first] = values[first] * mass[first, None] + values[second] * mass[second, None]
                values[first] /= total
            mass[first] = total[:, 0]
            to = np.arange(len(joined))
            to[own[second]] = own[first]
            joined = to[joined]
            left = np.ones(len(mass), bool)
            left[second] = False
            places, features, mass, own = places[left], features[left], mass[left], own[left]
        yield np.unique(joined, return_inverse=True)[1].reshape(-1)


def _along(places: Floats, draw: np.random.Generator) -> npt.NDArray[np.intp]:
    """Return the order along Morton's curve through a grid that is moved at random, borders with it."""
    positions = places.astype(np.float32)
    grid = PositionGrid.cubic(positions, float(np.ptp(positions, axis=0).max()) / (1 << DEPTH))
    return np.argsort(morton(grid.cells(positions) + draw.integers(0, 1 << DEPTH - 1, 3)), kind="stable")


def _pairs(features: Floats, mass: Floats, most: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return pairs to merge, ``most`` at most: each other's cheapest neighbours, the cheapest first."""
    n = len(mass)
    cost, partner = np.full(n, np.inf), np.zeros(n, np.intp)
    for gap in range(1, min(NEAR, n - 1) + 1):
        apart = ((features[:-gap] - features[gap:]) ** 2).sum(1)
        own = mass[:-gap] * mass[gap:] / (mass[:-gap] + mass[gap:]) * apart
        for here, there in ((np.arange(n - gap), gap), (np.arange(gap, n), -gap)):
            better = own < cost[here]
            cost[here[better]], partner[here[better]] = own[better], here[better] + there
    at = np.arange(n)
    first = np.flatnonzero((partner[partner] == at) & (at < partner))
    take = min(most, max(int(SHARE * len(first)), 1))
    first = first[np.argsort(cost[first], kind="stable")[:take]]
    return first, partner[first]


def _moments(splats: Splats, mass: Floats, group: Ints) -> Splats:
    """Return one splat a group, with the mean and the covariance of its splats."""
    n = int(group.max()) + 1
    total = np.bincount(group, mass, n)

    def mean(x: npt.NDArray[np.floating]) -> Floats:
        flat = x.reshape(len(x), -1).astype(np.float64)
        return np.stack([np.bincount(group, mass * c, n) / total for c in flat.T], axis=1)

    middle = mean(splats.positions)
    off = splats.positions - middle[group]
    axes = rotation_matrices(splats.rotations) * np.exp(splats.log_scales.T)
    own = np.einsum("ikn,jkn->nij", axes, axes) + off[:, :, None] * off[:, None, :]
    variances, turned = np.linalg.eigh(mean(own).reshape(n, 3, 3))
    turned *= np.where(np.linalg.det(turned) < 0, -1, 1)[:, None, None]
    log_scales = 0.5 * np.log(np.maximum(variances, FLOOR))
    return Splats.of(
        middle,
        log_scales=log_scales,
        rotations=orientations.of_matrices(turned),
        opacities=_opacities(splats, group, log_scales),
        colours=mean(splats.colours),
        harmonics=mean(splats.harmonics).reshape(n, -1, 3) if splats.bands else np.zeros((n, 0, 3)),
    )


def _opacities(splats: Splats, group: Ints, log_scales: Floats) -> Floats:
    """Return logits [groups] that cover as much as the splats of a group do together."""
    alpha = 1 / (1 + np.exp(-np.clip(splats.opacities.astype(np.float64), -30, 30)))
    covered = np.bincount(group, alpha * _area(splats.log_scales), len(log_scales))
    found = np.clip(covered / np.maximum(_area(log_scales), 1e-300), LEAST_ALPHA, MOST_ALPHA)
    return np.asarray(np.log(found / (1 - found)), np.float64)


def _area(log_scales: Array | Floats) -> Floats:
    """Return what an ellipsoid covers on average, but for a factor."""
    x, y, z = np.exp(log_scales.astype(np.float64)).T
    return np.asarray(x * y + y * z + x * z, np.float64)
