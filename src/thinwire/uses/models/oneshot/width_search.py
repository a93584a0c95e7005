"""A configuration for a budget, by looking at losses alone: a greedy search that goes both ways.

First the bits of weights, until what is left can come from inputs, then those of inputs. Each move tries
every layer one width up and one down. What the method's code has ends at the first configuration within the
budget; here what is left of the budget is then spent, and layers trade bits while that helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from thinwire.types import InputError, require
from thinwire.uses.models.oneshot.supernet import Configuration
from thinwire.uses.models.oneshot.supernet_training import Widths

ERROR = 1.5  # how much the error counts, against the cost [code]
SHARE = 0.95  # of what uniform weights cost, when inputs follow [code]
WEIGHTS, INPUTS = 0, 1

Error = Callable[[Configuration, int], float]  # of a configuration, at the n-th move
Cost = Callable[[Configuration], float]


@dataclass(frozen=True)
class Search:
    """Find a configuration of little error that costs ``budget`` at most.

    error: called with a configuration and the number of the move, so that all that one move tries can be
    measured on one batch. cost: must not fall when any width rises. ``start``: the width that it begins at.

    >>> def error(configuration, _):
    ...     return sum(2.0 ** (-2 * w) + 2.0 ** (-2 * a) for w, a in configuration)
    >>> def cost(configuration):
    ...     return sum(w * a for w, a in configuration)
    >>> Search((2, 3, 4), start=4, error=error, cost=cost).within(18, layers=2)
    ((3, 3), (3, 3))
    """

    widths: Widths
    start: int
    error: Error
    cost: Cost

    def within(self, budget: float, layers: int) -> Configuration:
        """Return what is found. Errors: ``InputError`` that names the least cost there is."""
        least: Configuration = ((self.widths[0], self.widths[0]),) * layers
        told = f"the smallest widths cost {self.cost(least):.0f}, and {budget:.0f} are asked for"
        require(self.cost(least) <= budget, InputError, told)
        found = ((self.start, self.start),) * layers
        found = self._descended(found, WEIGHTS, self._for_weights(budget, layers))
        found = self._descended(found, INPUTS, budget)
        found = self._descended(found, WEIGHTS, budget)  # where inputs could not save enough
        return self._refined(found, budget)

    def _for_weights(self, budget: float, layers: int) -> float:
        """Return the cost at which the bits of weights are few enough for now."""
        fitting = [w for w in self.widths if self.cost(((w, w),) * layers) <= budget]
        return max(budget, SHARE * self.cost(((fitting[-1], self.start),) * layers))

    def _descended(self, found: Configuration, kind: int, most: float) -> Configuration:
        """Return a configuration after moves of one kind until it costs ``most``, or can go no lower.

        Up or down, by error and cost; after as many moves as there are widths in all, down alone.
        """
        moves = 0
        while self.cost(found) > most:
            down = [moved for _, moved in self._moves(found, kind, -1)]
            if not down:
                break
            up = [moved for _, moved in self._moves(found, kind, 1)]
            free = moves < len(found) * len(self.widths)
            found = self._best(down + up if free else down, moves)
            moves += 1
        return found

    def _best(self, tried: list[Configuration], move: int) -> Configuration:
        errors, costs = [self.error(c, move) for c in tried], [self.cost(c) for c in tried]
        worst, dearest = max(errors) or 1.0, max(costs) or 1.0
        scores = [ERROR * e / worst + c / dearest for e, c in zip(errors, costs, strict=True)]
        return tried[scores.index(min(scores))]

    def _refined(self, found: Configuration, budget: float) -> Configuration:
        """Return a configuration that no move up makes better, nor a trade of bits, for as many as layers."""
        error, trades = self.error(found, 0), 0
        while True:
            tried = list(self._raised(found, budget))
            errors = [self.error(c, 0) for c in tried]
            if not errors or min(errors) >= error:
                if trades == len(found):
                    return found
                trades += 1
                tried = list(self._traded(found, budget))
                errors = [self.error(c, 0) for c in tried]
            if not errors or min(errors) >= error:
                return found
            error = min(errors)
            found = tried[errors.index(error)]

    def _raised(self, found: Configuration, budget: float) -> Iterator[Configuration]:
        """Yield what one width up gives, within the budget."""
        for kind in (WEIGHTS, INPUTS):
            yield from (up for _, up in self._moves(found, kind, 1) if self.cost(up) <= budget)

    def _traded(self, found: Configuration, budget: float) -> Iterator[Configuration]:
        """Yield what one width up and another one down give, within the budget."""
        for kind in (WEIGHTS, INPUTS):
            for i, up in self._moves(found, kind, 1):
                for other in (WEIGHTS, INPUTS):
                    for j, traded in self._moves(up, other, -1):
                        if (i, kind) != (j, other) and self.cost(traded) <= budget:
                            yield traded

    def _moves(self, found: Configuration, kind: int, by: int) -> Iterator[tuple[int, Configuration]]:
        """Yield each layer that can move one width, and the configuration after it."""
        for i, pair in enumerate(found):
            at = self.widths.index(pair[kind]) + by
            if 0 <= at < len(self.widths):
                width = self.widths[at]
                moved = (width, pair[INPUTS]) if kind == WEIGHTS else (pair[WEIGHTS], width)
                yield i, (*found[:i], moved, *found[i + 1 :])
