"""How samples are spread over clients: labels, as in ``dirichlet:0.3``, and amounts, as in ``skew:100``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.runs.options import nearest
from thinwire.types import InputError, require
from thinwire.uses.federated.run import dealing
from thinwire.uses.federated.run.tasks import Dataset

IID, DIRICHLET, CLASSES, SKEW, SPEAKER = "iid", "dirichlet", "classes", "skew", "speaker"
LABELS = (IID, DIRICHLET, CLASSES, SPEAKER)
EXAMPLE = "write it like iid, dirichlet:0.3, classes:2, skew:100, dirichlet:0.5+skew:100 or speaker"
MOST = 1e6  # of alpha and of a skew: beyond it, nothing differs from iid, or nobody has as many samples
_NUMBER = re.compile(r"[+-]?(\d{1,12}(\.\d{0,12})?|\.\d{1,12})(e[+-]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True)
class Split:
    """Which labels and how many samples a client gets.

    ``labels``: ``iid``; ``dirichlet``, where ``amount`` is alpha and each class is dealt to all clients by
    shares drawn from a Dirichlet distribution ([source] as in FedLuck's released code); ``classes``,
    ``amount`` of them a client ([quoted] #C of gamma-FedHT's experiments); ``speaker``, one a client.
    ``skew``: numbers of samples are an arithmetic series whose largest is so many times its smallest
    ([quoted] SR of DAGC's experiments), the first client having most; None leaves them as labels have it.
    With it, ``dirichlet`` draws each client's shares of the classes instead.

    >>> Split.parse("dirichlet:0.5+skew:100")
    Split(labels='dirichlet', amount=0.5, skew=100.0)
    >>> str(Split("classes", 2))
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
    def parse(cls, text: str) -> Split:
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
        >>> [len(part) for part in Split.parse("skew:3").deal(data, 3)]
        [3, 2, 1]
        """
        self._check(data, clients)
        if self.labels == SPEAKER:
            who = data.speakers if data.speakers is not None else torch.zeros(0)
            return tuple((who == voice).nonzero().flatten() for voice in who.unique())
        table = data.labels.numpy()
        sizes = None if self.skew is None else dealing.series(len(data), clients, self.skew)
        if self.labels == DIRICHLET:
            parts = dealing.by_dirichlet(table, clients, self.amount, sizes, seed)
        elif self.labels == CLASSES:
            parts = dealing.by_classes(table, clients, int(self.amount), sizes, seed)
        else:
            parts = dealing.at_random(len(data), clients, sizes, seed)
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
