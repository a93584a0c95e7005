"""Deal samples to clients, each to at most one: pure functions of labels and a seed, without retries.

A client's samples are sorted numbers. No function leaves a client empty where there are as many samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.types import InputError, require

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def at_random(samples: int, clients: int, sizes: Numbers | None, seed: int) -> list[Numbers]:
    """Deal in an order drawn at random: as many as ``sizes`` say, else alike but for one sample."""
    order = np.random.default_rng(seed).permutation(samples)
    ends = np.cumsum(sizes if sizes is not None else even(samples, clients))
    return [np.sort(part) for part in np.split(order, ends[:-1])]


def by_dirichlet(
    labels: Numbers, clients: int, alpha: float, sizes: Numbers | None, seed: int
) -> list[Numbers]:
    """Deal by shares from a Dirichlet distribution: of each class over clients, or as ``sizes`` demand.

    Without sizes, a client that got nothing is given a sample of the one that has most. With sizes, each
    client draws shares of the classes and takes what is left of them, in an order drawn at random.
    """
    rng = np.random.default_rng(seed)
    pools = _pools(labels, rng)
    held = np.array([len(pool) for pool in pools])
    if sizes is None:
        table = np.stack([_apportioned(int(n), _shares(rng, alpha, clients)) for n in held], 1)
        _fill(table)
        return _dealt(pools, table)
    table = np.zeros((clients, len(pools)), np.int64)
    for client in rng.permutation(clients):
        left = held - table.sum(0)
        table[client] = _taken(int(sizes[client]), _shares(rng, alpha, len(pools)), left)
    return _dealt(pools, table)


def by_classes(labels: Numbers, clients: int, each: int, sizes: Numbers | None, seed: int) -> list[Numbers]:
    """Deal ``each`` classes to every client, all classes about as often.

    Without sizes, those who hold a class share it alike, and all samples are dealt. With sizes, each client
    has as many of each of its classes; all are made smaller by one factor until the scarcest class does.
    """
    rng = np.random.default_rng(seed)
    pools = _pools(labels, rng)
    held = np.array([len(pool) for pool in pools])
    weights = np.ones(clients) if sizes is None else sizes.astype(float)
    holds = _holders(weights, len(pools), each, rng)
    scarce = held < holds.sum(0)
    few = f"classes:{each} lets {holds.sum(0).max()} clients share a class, which has fewer samples"
    require(not scarce.any(), InputError, f"{few}; give fewer clients or fewer classes a client")
    if sizes is None:
        table = np.stack([_among(int(n), holds[:, c]) for c, n in enumerate(held)], 1)
    else:
        wanted = holds * (weights / each)[:, None]
        table = np.floor(wanted * min(1.0, (held / wanted.sum(0)).min()) + 1e-9).astype(np.int64)
        small = f"the smallest of {clients} clients would lack samples of its {each} classes"
        require(bool((table[holds] > 0).all()), InputError, f"{small}; give a smaller skew or fewer clients")
    return _dealt(pools, table)


def series(samples: int, clients: int, skew: float) -> Numbers:
    """Return numbers of samples in an arithmetic series: the first is ``skew`` times the last.

    ``InputError`` where the last would have none.

    >>> series(202, 4, 100).tolist()
    [100, 67, 34, 1]
    """
    weights = np.linspace(skew, 1, clients)
    least = samples / weights.sum()
    none = f"skew:{skew:g} leaves the smallest of {clients} clients {least:.2g} of {samples} samples"
    require(least >= 1 - 1e-9, InputError, f"{none}; give a smaller skew or fewer clients")
    sizes = np.maximum(_apportioned(samples, weights / weights.sum()), 1)
    sizes[0] -= sizes.sum() - samples  # rounding may have given the last one more than its due
    return sizes


def even(samples: int, clients: int) -> Numbers:
    """Return numbers of samples that differ by one at most.

    >>> even(7, 3).tolist()
    [3, 2, 2]
    """
    return samples // clients + (np.arange(clients) < samples % clients).astype(np.int64)


def _pools(labels: Numbers, rng: np.random.Generator) -> list[Numbers]:
    """Return the samples of each class that there is, each in an order drawn at random."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]


def _dealt(pools: list[Numbers], table: Numbers) -> list[Numbers]:
    ends = np.cumsum(table, 0)
    cuts = [np.split(pool, ends[:, c])[:-1] for c, pool in enumerate(pools)]
    return [np.sort(np.concatenate(parts)) for parts in zip(*cuts, strict=True)]


def _shares(rng: np.random.Generator, alpha: float, n: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    shares = rng.dirichlet(np.full(n, alpha))
    if np.isfinite(shares).all() and shares.sum() > 0:
        return shares
    return np.eye(n)[rng.integers(n)]  # alpha so small that one has all, and floats cannot say it


def _apportioned(samples: int, shares: np.ndarray[Any, np.dtype[np.float64]]) -> Numbers:
    """Return whole numbers that sum to ``samples``, nearest to its shares: largest remainders first."""
    exact = shares / shares.sum() * samples
    whole = np.floor(exact + 1e-9).astype(np.int64)
    rest = samples - int(whole.sum())
    if rest > 0:
        whole[np.argsort(whole - exact, kind="stable")[:rest]] += 1
    elif rest < 0:
        whole[np.argmax(whole)] += rest
    return whole


def _fill(table: Numbers) -> None:
    """Give each client that has nothing a sample of the one with most, of the class that one has most of."""
    for client in np.flatnonzero(table.sum(1) == 0):
        rich = int(np.argmax(table.sum(1)))
        kind = int(np.argmax(table[rich]))
        table[rich, kind] -= 1
        table[client, kind] += 1


def _taken(wanted: int, shares: np.ndarray[Any, np.dtype[np.float64]], left: Numbers) -> Numbers:
    """Return how many of each class a client takes: by its shares, and of others where a class runs out."""
    taken = np.zeros_like(left)
    for _ in range(len(left) + 1):  # each pass but the last empties a class
        open_ = left > taken
        wishes = np.where(open_, shares, 0.0)
        if wishes.sum() < 1e-12:  # it draws nothing of what is there: all is as good
            wishes = (left - taken).astype(float)
        missing = wanted - int(taken.sum())
        if missing == 0:
            break
        taken = np.minimum(left, taken + _apportioned(missing, wishes))
    return taken


def _holders(
    weights: np.ndarray[Any, np.dtype[np.float64]], classes: int, each: int, rng: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return who holds which class, [clients, classes]: the largest first, each the least laden classes."""
    load, holds = np.zeros(classes), np.zeros((len(weights), classes), bool)
    for client in np.argsort(-weights, kind="stable"):
        lightest = np.lexsort((rng.random(classes), load))[:each]
        holds[client, lightest] = True
        load[lightest] += weights[client]
    return holds


def _among(samples: int, holds: np.ndarray[Any, np.dtype[np.bool_]]) -> Numbers:
    found = np.zeros(len(holds), np.int64)
    found[holds] = even(samples, int(holds.sum()))
    return found
