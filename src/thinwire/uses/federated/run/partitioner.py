"""Whose samples are whose: labels, as in ``dirichlet:0.3``, and amounts, as in ``skew:100``.

Pure functions of labels and a seed deal samples to clients, each to at most one, without retries. A client's
samples are sorted numbers. No function leaves a client empty where there are as many samples.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.runs.options import nearest
from thinwire.types import InputError, require
from thinwire.uses.federated.run.datasets import Dataset

IID, DIRICHLET, CLASSES, SKEW, SPEAKER = "iid", "dirichlet", "classes", "skew", "speaker"
LABELS = (IID, DIRICHLET, CLASSES, SPEAKER)
EXAMPLE = "write it like iid, dirichlet:0.3, classes:2, skew:100, dirichlet:0.5+skew:100 or speaker"
MOST = 1e6  # of alpha and of a skew: beyond it, nothing differs from iid, or nobody has as many samples
_NUMBER = re.compile(r"[+-]?(\d{1,12}(\.\d{0,12})?|\.\d{1,12})(e[+-]?\d{1,3})?", re.ASCII)
Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Partitioner:
    """Which labels and how many samples a client gets.

    ``labels``: ``iid``; ``dirichlet``, where ``amount`` is alpha and each class is dealt to all clients by
    shares drawn from a Dirichlet distribution ([source] as in FedLuck's released code); ``classes``,
    ``amount`` of them a client ([quoted] #C of gamma-FedHT's experiments); ``speaker``, one a client.
    ``skew``: numbers of samples are an arithmetic series whose largest is so many times its smallest
    ([quoted] SR of DAGC's experiments), the first client having most; None leaves them as labels have it.
    With it, ``dirichlet`` draws each client's shares of the classes instead.

    >>> Partitioner.parse("dirichlet:0.5+skew:100")
    Partitioner(labels='dirichlet', amount=0.5, skew=100.0)
    >>> str(Partitioner("classes", 2))
    'classes:2'
    """

    labels: str = IID
    amount: float = 0.0
    skew: float | None = None

    def __post_init__(self) -> None:
        hint = nearest(self.labels, LABELS) or f"; {EXAMPLE}"
        require(self.labels in LABELS, InputError, f"--split {self.labels!r} is unknown{hint}")
        given, alpha = f"--split {self}", self.labels == DIRICHLET
        within = not alpha or 0 < self.amount <= MOST
        require(
            within, InputError, f"{given} has alpha {self.amount:g}; give a number above 0, up to {MOST:g}"
        )
        whole = self.labels != CLASSES or (self.amount >= 1 and float(self.amount).is_integer())
        require(whole, InputError, f"{given} gives a client {self.amount:g} classes; give a whole number")
        fair = self.skew is None or 1 <= self.skew <= MOST
        require(fair, InputError, f"{given} has a skew of {self.skew}; give a number from 1 to {MOST:g}")
        alone = self.labels != SPEAKER or self.skew is None
        require(alone, InputError, f"{given} has numbers of samples of its own; leave the skew out")

    @classmethod
    def parse(cls, text: str) -> Partitioner:
        """Read a split; of two with a plus between them, the first says labels, the second amounts.

        Errors: ``InputError``, one sentence.
        """
        labels, plus, amounts = text.strip().partition("+")
        name, value = _part(labels, text)
        if name == SKEW and not plus:
            return cls(skew=value)
        require(name != SKEW, InputError, f"--split {text!r} has no labels before the plus; {EXAMPLE}")
        if not plus:
            return cls(name, value)
        second, skew = _part(amounts, text)
        require(second == SKEW, InputError, f"--split {text!r} has no skew after the plus; {EXAMPLE}")
        return cls(name, value, skew)

    def __str__(self) -> str:
        labels = f"{self.labels}:{self.amount:.12g}" if self.labels in (DIRICHLET, CLASSES) else self.labels
        skew = f"{SKEW}:{self.skew:.12g}" if self.skew is not None else ""
        return "+".join(part for part in (labels if labels != IID or not skew else "", skew) if part)

    def deal(self, data: Dataset, clients: int, seed: int = 0) -> tuple[Tensor, ...]:
        """Return the samples of each client: numbers [n] int64 into ``data``, in order, none twice.

        All are dealt, but for those of ``classes:K+skew:R`` that would spoil both. The same for the same
        seed. Errors: ``InputError`` at once for what cannot be: no client is left empty.

        >>> data = Dataset("toy", *(torch.zeros(6, 1), torch.arange(6) % 2) * 2, classes=2)
        >>> [len(part) for part in Partitioner.parse("skew:3").deal(data, 3)]
        [3, 2, 1]
        """
        self._check(data, clients)
        if self.labels == SPEAKER:
            who = data.speakers if data.speakers is not None else torch.zeros(0)
            return tuple((who == voice).nonzero().flatten() for voice in who.unique())
        table = data.labels.numpy()
        sizes = None if self.skew is None else series(len(data), clients, self.skew)
        if self.labels == DIRICHLET:
            parts = by_dirichlet(table, clients, self.amount, sizes, seed)
        elif self.labels == CLASSES:
            parts = by_classes(table, clients, int(self.amount), sizes, seed)
        else:
            parts = at_random(len(data), clients, sizes, seed)
        return tuple(torch.from_numpy(part) for part in parts)

    def _check(self, data: Dataset, clients: int) -> None:
        require(clients >= 1, InputError, f"{clients} clients; give 1 or more")
        enough = clients <= len(data)
        few = f"{clients} clients are more than the {len(data)} samples of {data.name}; give fewer clients"
        require(enough, InputError, few)
        if self.labels == CLASSES:
            there = int(data.labels.unique().numel())
            many = f"--split {self}: {data.name} has {there} classes; give at most as many"
            require(self.amount <= there, InputError, many)
            left = f"--split {self}: {clients} clients leave out some of the {there} classes of {data.name}"
            require(clients * self.amount >= there, InputError, f"{left}; give more clients or classes")
        if self.labels == SPEAKER:
            require(data.speakers is not None, InputError, f"--split speaker: {data.name} names no speakers")
            found = 0 if data.speakers is None else int(data.speakers.unique().numel())
            other = f"--split speaker: {data.name} has {found} speakers; give --clients {found}"
            require(clients == found, InputError, other)


def counts(data: Dataset, parts: tuple[Tensor, ...]) -> Tensor:
    """Return how many samples of each class each client has, [clients, classes] int64.

    >>> data = Dataset("toy", *(torch.zeros(4, 1), torch.tensor([0, 1, 1, 2])) * 2, classes=3)
    >>> counts(data, (torch.tensor([0, 1]), torch.tensor([2, 3]))).tolist()
    [[1, 1, 0], [0, 1, 1]]
    """
    return torch.stack([data.labels[part].bincount(minlength=data.classes) for part in parts])


def _part(text: str, whole: str) -> tuple[str, float]:
    name, colon, value = text.strip().partition(":")
    hint = nearest(name, (*LABELS, SKEW)) or f"; {EXAMPLE}"
    require(name in (*LABELS, SKEW), InputError, f"--split {whole!r} is unknown{hint}")
    numbered = name in (DIRICHLET, CLASSES, SKEW)
    require(bool(colon) == numbered, InputError, f"cannot read --split {whole!r}; {EXAMPLE}")
    if not numbered:
        return name, 0.0
    good = _NUMBER.fullmatch(value) is not None and math.isfinite(float(value))
    require(good, InputError, f"--split {whole!r} has {value!r} for a number; {EXAMPLE}")
    return name, float(value)


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
