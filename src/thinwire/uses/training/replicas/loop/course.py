"""How replicas train: where they go on from, and at which rates. Compared while they train."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from torch.optim import Optimizer

from thinwire.collectives.exchange import words_of
from thinwire.types import WRONG_VALUES, InputError, PayloadError, require
from thinwire.uses.training.replicas.networks import Network

Said = tuple[int, list[float]]  # steps, and the learning rate of each group of each optimiser


class Course:
    """Let no replica go on from another step than the others, and warn where one learns at another rate.

    Said at the first step and at each drain. Rates may differ by intent, and a step that a gradient scaler
    leaves out may move a schedule: so they are no error.
    """

    def __init__(self, network: Network, optimizers: Sequence[Optimizer]) -> None:
        self._exchange, self._deadline = network.messages("course"), network.deadline
        self._optimizers, self._number = optimizers, 0
        self._said: dict[int, Said] = {}  # what the others' words are not yet compared with
        self._warned: set[int] = set()

    def say(self, steps: int) -> None:
        """Tell the others how many steps this replica has taken, and its rates."""
        rates = [float(group.get("lr", 0.0)) for o in self._optimizers for group in o.param_groups]
        self._exchange.post(self._number, json.dumps({"steps": steps, "rates": rates}).encode())
        self._said[self._number] = steps, rates
        self._number += 1

    def begin(self, steps: int) -> None:
        """Tell the others once."""
        if not self._number:
            self.say(steps)

    def hear(self) -> None:
        """Compare with what the others said, wherever this replica did and has not yet."""
        for number, own in self._said.items():
            for rank, data in self._exchange.collect(number, self._deadline).items():
                theirs = _read(data, rank)
                text = f"rank {rank} goes on from step {theirs[0]}, and this replica from step {own[0]}"
                same = number > 0 or theirs[0] == own[0]
                require(same, InputError, f"{text}; have all load what they saved behind one drain")
                self._compare(rank, own, theirs)
        self._said = {}

    def close(self) -> None:
        """Exchange nothing more."""
        self._exchange.close()

    def _compare(self, rank: int, own: Said, theirs: Said) -> None:
        pairs = zip_longest(own[1], theirs[1], fillvalue=math.nan)
        unlike = [(i, a, b) for i, (a, b) in enumerate(pairs) if not math.isclose(a, b, rel_tol=1e-6)]
        if not unlike or rank in self._warned:
            return
        self._warned.add(rank)
        group, here, there = unlike[0]
        text = (
            f"after step {own[0]} group {group} learns at the rate {there:g} at rank {rank}, and at {here:g}"
        )
        text += (
            " here; if that is not meant, give all one schedule, and on return load optimiser and scheduler"
        )
        warnings.warn(text, stacklevel=2)


def _read(data: bytes, rank: int) -> Said:
    try:
        words: Any = words_of(bytes(data), f"rank {rank}")
        return int(words["steps"]), [float(x) for x in words["rates"]]
    except WRONG_VALUES as e:
        raise PayloadError(f"what rank {rank} says of its course cannot be read") from e
