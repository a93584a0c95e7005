"""A model's tensors to entries: within bytes, within bits in memory, or like an earlier version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from thinwire.assets.weights.choices import (
    WIDTHS,
    Matrix,
    grouped,
    grouped_site,
    nearest,
    stepped,
    stepped_site,
    with_scales,
    with_steps,
)
from thinwire.assets.weights.entry import NAMES, Entry, pack_entry, unpack_entry
from thinwire.assets.weights.model import Model
from thinwire.assets.weights.tensors import Coded, Grouped, Plain, Same, Stepped
from thinwire.policies.allocate import ByteBudget, Site
from thinwire.types import InputError, require

WITHIN = 0.004  # of a budget: less is not worth another round
ROUNDS = 6
SMALL = 1 << 12  # weights of a matrix that is coded in all ways at once
PLACE = 16  # bytes that a tensor's place in the header may grow by
NEAR = 1.3  # times the estimate of the smallest size: below it, that is coded to know it
Entries = dict[str, Entry]


def to_budget(model: Model, most: int, size: Callable[[Entries], int]) -> Entries:
    """Return entries of all tensors whose ``size`` as a file is ``most`` or a little less.

    All as they are where that fits. Sizes are estimated, coded, measured and corrected; of small tensors they
    are known at once. Errors: ``InputError`` that names a size that will do.
    """
    search = _Search(model)
    kept, sites = model.kept(), [search.site(model.matrix(name)) for name in model.coded]
    if sum(max(site.nbytes) for site in sites) <= most:
        whole = model.lossless()
        if size(whole) <= most:
            return whole
    blank = {name: Entry(_about(model, name), b"") for name in model.coded}
    rest = size(kept | blank) + PLACE * len(blank)

    def whole_of(coded: Entries) -> Entries:
        return model.in_order(kept | coded)

    coarsest = [site.nbytes.index(min(site.nbytes)) for site in sites]
    if most < NEAR * (rest + sum(min(site.nbytes) for site in sites)):
        least = size(whole_of(search.coded(sites, coarsest)))
        told = f"the model takes {least} bytes at least, and {most} are asked for; ask for {least} or more"
        require(least <= most, InputError, told)
    found = search.within(sites, most, rest, lambda coded: size(whole_of(coded)))
    return whole_of(found or search.coded(sites, coarsest))


def _about(model: Model, name: str) -> dict[str, object]:
    """Return what a file will say of a tensor that is coded by steps."""
    x = model.tensors[name]
    about: dict[str, object] = {"kind": Stepped.kind, "shape": list(x.shape), "dtype": NAMES[x.dtype]}
    return about | ({"swapped": True} if name in model.swapped else {})


class _Search:
    """What was coded so far of a model, by tensor and choice."""

    def __init__(self, model: Model) -> None:
        self._model, self._made = model, dict[tuple[str, int], Entry]()

    def site(self, matrix: Matrix) -> Site:
        """Return the choices of a matrix."""
        found = stepped_site(matrix)
        if matrix.x.numel() > SMALL:
            return found
        exact = (len(self._entry(matrix, i).data) for i in range(len(found.costs)))
        return Site(found.name, found.costs, tuple(map(float, exact)))

    def within(
        self, sites: Sequence[Site], most: int, rest: float, size: Callable[[Entries], int]
    ) -> Entries:
        """Return entries of the sites: choose, code, see what they take and choose again; none if none fit.

        ``rest``: bytes of what is not coded, about.
        """
        best, before, spare = Entries(), list[int](), 0.0
        ratios = {site.name: 1.0 for site in sites}
        for _ in range(ROUNDS):
            scaled = [Site(s.name, s.costs, tuple(ratios[s.name] * n for n in s.nbytes)) for s in sites]
            floor = sum(min(s.nbytes) for s in scaled)
            chosen = ByteBudget(max(most - rest - spare, floor)).choose(scaled)
            found = self.coded(sites, chosen)
            ratios = {
                s.name: len(found[s.name].data) / s.nbytes[i] for s, i in zip(sites, chosen, strict=True)
            }
            nbytes = size(found)
            rest = nbytes - sum(len(entry.data) for entry in found.values())
            if size(best) <= nbytes <= most:
                best = found
            if chosen == before or (1 - WITHIN) * most <= nbytes <= most:
                break
            before, spare = chosen, max(0.0, spare + nbytes - most)
        return best

    def coded(self, sites: Sequence[Site], chosen: Sequence[int]) -> Entries:
        """Return entries of the sites at their choices."""
        found = Entries()
        for site, choice in zip(sites, chosen, strict=True):
            made = self._made.get((site.name, choice))
            found[site.name] = made or self._entry(self._model.matrix(site.name), choice)
        return found

    def _entry(self, matrix: Matrix, choice: int) -> Entry:
        made = pack_entry(stepped(matrix, choice, self._model.feedback))
        self._made[matrix.name, choice] = made
        return made


def to_width(model: Model, bits: float) -> Entries:
    """Return entries of fixed widths that take ``bits`` a coded weight in memory, scales included, or less.

    Errors: ``InputError`` that names the least there is.
    """
    sites = [grouped_site(model.matrix(name)) for name in model.coded]
    weights = max(model.weights, 1)
    least = sum(min(site.nbytes) for site in sites) * 8 / weights
    told = f"{WIDTHS[0]}-bit codes and their scales take {least:.3f} bits a weight, not {bits:g}"
    require(bits >= least, InputError, f"{told}; ask for that or more")
    chosen = ByteBudget(bits * weights / 8).choose(sites)
    coded = {
        name: pack_entry(grouped(model.matrix(name), choice, model.feedback))
        for name, choice in zip(model.coded, chosen, strict=True)
    }
    return model.in_order(model.kept() | coded)


def at_width(model: Model, width: int) -> Entries:
    """Return entries of one width for all, each weight rounded alone: what others are compared with."""
    coded = {name: pack_entry(nearest(model.matrix(name), width)) for name in model.coded}
    return model.in_order(model.kept() | coded)


def like(model: Model, old: Mapping[str, Entry]) -> Entries:
    """Return entries with the steps of an earlier version's, and its codes where they are near enough.

    Errors: ``InputError`` where the tensors are others; ``PayloadError``.
    """
    strange = sorted(set(model.tensors) ^ set(old))
    told = f"{strange[0] if strange else ''!s} is in one of both models alone; pack this one anew"
    require(not strange, InputError, told)
    return {name: _like(model, name, unpack_entry(old[name], name)) for name in model.tensors}


def _like(model: Model, name: str, old: Coded) -> Entry:
    if isinstance(old, (Plain, Same)):
        return model.whole(name)
    same = tuple(model.tensors[name].shape) == old.shape
    require(same, InputError, f"{name} has another shape than before; pack this model anew")
    return pack_entry(_near(model.matrix(name), old, model.feedback))


def _near(matrix: Matrix, old: Stepped | Grouped, feedback: bool) -> Coded:
    if isinstance(old, Grouped):
        return with_scales(matrix, old, feedback)
    return with_steps(matrix, old.row_parts, old.column_parts, feedback, old.codes)
