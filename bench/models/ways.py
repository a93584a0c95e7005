"""The ways to pack a language model that ``packed`` compares, each to the entries of a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

from thinwire.choosing.allocate import ByteBudget, Site
from thinwire.types import InputError, require
from thinwire.uses.models import choices
from thinwire.uses.models.choices import WIDTHS, grouped, grouped_site, nearest
from thinwire.uses.models.encoding import Entries, at_width, to_budget
from thinwire.uses.models.entry import Entry, pack_entry
from thinwire.uses.models.feedback import DAMPING
from thinwire.uses.models.model import Model
from thinwire.uses.models.moments import Moments

BUDGETS = (3.0, 3.5, 4.0)  # bits a weight
LOWER = (2.0, 2.25, 2.5, 2.75)  # of ours alone
SOURCE, OURS = "source", "ours"
WAYS: dict[str, tuple[float, ...]] = {
    SOURCE: (32.0,),
    "nearest": (3.0, 4.0),
    "gptq": (3.0, 4.0),
    "lagrangian": BUDGETS,
    "rounded": BUDGETS,
    "rows": BUDGETS,
    OURS: (*BUDGETS, *LOWER),
}
TRIES = 8  # of a width in memory whose file is as large as a budget


class Ways:
    """A model packed in every way; ``size`` says how large the file of entries is."""

    def __init__(self, model: Model, size: Callable[[Entries], int]) -> None:
        self._model, self._size = model, size
        self._made = dict[tuple[str, int], Entry]()

    def entries(self, way: str, bits: float, most: int) -> Entries:
        """Return the model in a way: in ``most`` bytes, or at a width of ``bits`` for all."""
        match way:
            case "nearest":
                return at_width(self._model, int(bits))
            case "gptq":
                return self._fed_forward(WIDTHS.index(int(bits)))
            case "lagrangian":
                return self._lagrangian(most)
            case "rounded":
                return to_budget(alone(self._model), most, self._size)
            case "rows":
                with patch.object(choices, "COLUMNS", 0.0):
                    return to_budget(self._model, most, self._size)
        return to_budget(self._model, most, self._size)

    def _fed_forward(self, choice: int) -> Entries:
        model = self._model
        coded = {name: pack_entry(grouped(model.matrix(name), choice)) for name in model.coded}
        return model.in_order(model.kept() | coded)

    def _lagrangian(self, most: int) -> Entries:
        """Return weights rounded alone at widths by one slope, as many bits as the file has room for."""
        with patch.object(choices, "CLIPS", (1.0,)):  # the scales of nearest
            sites = [grouped_site(alone(self._model).matrix(name)) for name in self._model.coded]
        low, high, best = sum(min(s.nbytes) for s in sites), 2.0 * most, Entries()
        for _ in range(TRIES):
            budget = (low + high) / 2
            found = self._nearest(sites, ByteBudget(budget).choose(sites))
            low, high, best = (budget, high, found) if self._size(found) <= most else (low, budget, best)
        require(bool(best), InputError, f"no widths of groups make a file of {most} bytes")
        return best

    def _nearest(self, sites: list[Site], chosen: list[int]) -> Entries:
        coded = Entries()
        for site, i in zip(sites, chosen, strict=True):
            if (site.name, i) not in self._made:
                made = pack_entry(nearest(self._model.matrix(site.name), WIDTHS[i]))
                self._made[site.name, i] = made
            coded[site.name] = self._made[site.name, i]
        return self._model.in_order(self._model.kept() | coded)


def alone(model: Model) -> Model:
    """Return a model whose moments say of each column alone what its errors cost: none are fed forward."""
    return replace(model, moments={name: _cut(own) for name, own in model.moments.items()})


def _cut(moments: Moments) -> Moments:
    own = moments.columns.diagonal()
    return Moments(moments.rows, own + DAMPING * own.mean())  # damped as where errors are fed forward
