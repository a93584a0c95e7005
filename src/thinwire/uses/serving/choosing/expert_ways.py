"""Other ways to run a mixture of experts, by arithmetic: experts over machines, or read from a disk.

Nothing here is measured or built. Over slow links, experts over machines are the wrong cut: a token waits for
two exchanges in each of its layers, where stages let it wait once a machine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a model: ``layers`` that have ``experts`` each, of which a token meets ``active``.

    ``nbytes``: of one expert's weights; ``width``: bytes of a token's hidden state.
    """

    layers: int
    experts: int
    active: int
    nbytes: float
    width: float

    def met(self, tokens: int) -> float:
        """Return how many experts of a layer so many tokens meet, were each as likely as any other.

        >>> ExpertShape(1, 8, 2, 1.0, 1.0).met(1)
        2.0
        """
        return self.experts * (1 - (1 - self.active / self.experts) ** tokens)


def exchange_seconds(
    shape: ExpertShape, machines: int, tokens: int, rate: float | None, delay: float
) -> float:
    """Return how long a pass waits for the exchanges of experts that are spread over machines, at least.

    Derived: in each layer with experts, tokens go out and come back. Either exchange takes a way's delay, and
    the time of what one machine sends the others. A token's hidden state goes to each machine that has any of
    its experts.

    >>> exchange_seconds(ExpertShape(24, 8, 2, 1.0, 1e3), machines=2, tokens=1, rate=None, delay=0.02)
    0.96
    """
    if machines < 2:
        return 0.0
    others = (machines - 1) * (1 - (1 - 1 / machines) ** shape.active)
    own = max(1.0, tokens / machines)  # tokens that a machine has itself, as they are dealt out
    sent = own * others * shape.width / rate if rate else 0.0
    return shape.layers * 2 * (delay + sent)


def read_seconds(shape: ExpertShape, tokens: int, held: float, rate: float) -> float:
    """Return how long one machine reads experts from a disk of ``rate`` bytes/s in a pass of ``tokens``.

    Derived: it reads those that are met and are not among the share ``held`` in memory, each as likely as any
    other.

    >>> read_seconds(ExpertShape(24, 8, 2, nbytes=1e8, width=1.0), tokens=1, held=0.5, rate=1e9)
    2.4
    """
    return shape.layers * shape.met(tokens) * shape.nbytes * (1 - held) / rate
