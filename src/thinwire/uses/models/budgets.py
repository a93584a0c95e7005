"""A model's tensors to entries: within bytes, within bits in memory, or like an earlier version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch

from thinwire.choosing.allocate import ByteBudget, Site
from thinwire.types import InputError, PayloadError, require
from thinwire.uses.models.choices import (
    Matrix,
    grouped,
    grouped_site,
    nearest,
    renewed,
    stepped,
    stepped_site,
    with_scales,
    with_steps,
)
from thinwire.uses.models.entry import NAMES, PackedTensor, pack_entry, unpack_entry
from thinwire.uses.models.tensors import Coded, Grouped, Plain, Stepped, Tied
from thinwire.uses.models.weights_to_pack import Model

WITHIN = 0.004  # of a budget: less is not worth another round
ROUNDS = 6
SMALL = 1 << 12  # weights of a matrix that is coded in all ways at once
PLACE = 16  # bytes that a tensor's place in the header may grow by
SOME = 0.01  # of the groups of a matrix: what has other scales in more of them is named
NEAR = 1.3  # times the estimate of the smallest size: below it, that is coded to know it
Entries = dict[str, PackedTensor]


def to_budget(model: Model, most: int, size: Callable[[Entries], int]) -> Entries:
    """Return entries of all tensors whose ``size`` as a file is ``most`` or a little less.

    All as they are where that fits. Sizes are estimated, coded, measured and corrected; of small tensors they
    are known at once. Errors: ``InputError`` that names a size that will do.
    """
    search = _Search(model)
    kept, sites = model.kept(), [search.site(model.matrix(name)) for name in model.coded]

    def whole_of(coded: Entries) -> Entries:
        return model.in_order(kept | coded)

    if sum(max(site.nbytes) for site in sites) <= most:
        whole = model.lossless()
        if size(whole) <= most:
            return whole
        finest = search.coded(sites, [0] * len(sites))
        found = whole_of(_filled(sites, finest, whole, most - size(whole_of(finest))))
        if size(found) <= most:
            return found
    # Not empty: a file that is tiny for what it holds is padded.
    blank = {
        site.name: PackedTensor(_about(model, site.name), bytes(int(min(site.nbytes)))) for site in sites
    }
    rest = size(kept | blank) - sum(len(entry.data) for entry in blank.values())

    coarsest = [site.nbytes.index(min(site.nbytes)) for site in sites]
    if most < NEAR * (rest + sum(min(site.nbytes) for site in sites)):
        _check_least(size(whole_of(search.coded(sites, coarsest))), most)
    found = search.within(sites, most, rest, lambda coded: size(whole_of(coded)))
    if not found:
        found = search.coded(sites, coarsest)
        _check_least(size(whole_of(found)), most)
    return whole_of(found)


def _filled(sites: Sequence[Site], finest: Entries, whole: Entries, room: int) -> Entries:
    """Return the finest steps, and tensors as they are where ``room`` more bytes have place for that."""
    ways = [(whole[site.name], finest[site.name]) for site in sites]
    nbytes = [tuple(float(len(entry.data)) for entry in both) for both in ways]
    own = [Site(s.name, (0.0, s.costs[0]), n) for s, n in zip(sites, nbytes, strict=True)]
    least = sum(map(min, nbytes))
    chosen = ByteBudget(max(room - PLACE * len(sites), 0) + least).choose(own)
    return {site.name: both[i] for site, both, i in zip(sites, ways, chosen, strict=True)}


def _check_least(least: int, most: int) -> None:
    told = f"the model takes {least} bytes at least, and {most} are asked for; ask for {least} or more"
    require(least <= most, InputError, told)


def _about(model: Model, name: str) -> dict[str, object]:
    """Return what a file will say of a tensor that is coded by steps."""
    x = model.tensors[name]
    about: dict[str, object] = {"kind": Stepped.kind, "shape": list(x.shape), "dtype": NAMES[x.dtype]}
    return about | ({"swapped": True} if name in model.swapped else {})


class _Search:
    """What was coded so far of a model, by tensor and choice."""

    def __init__(self, model: Model) -> None:
        self._model, self._made = model, dict[tuple[str, int], PackedTensor]()

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
        best, before, spare, fullest = Entries(), list[int](), 0.0, 0
        for _ in range(ROUNDS):
            corrected = [self._corrected(site) for site in sites]
            floor = sum(min(s.nbytes) for s in corrected)
            chosen = ByteBudget(max(most - rest - spare, floor)).choose(corrected)
            found = self.coded(sites, chosen)
            nbytes = size(found)
            rest = nbytes - sum(len(entry.data) for entry in found.values())
            if fullest <= nbytes <= most:
                best, fullest = found, nbytes
            if chosen == before or (1 - WITHIN) * most <= nbytes <= most:
                break
            before, spare = chosen, max(0.0, spare + nbytes - most)
        if fullest < (1 - WITHIN) * most:
            return self._settled(sites, most - rest - PLACE, lambda coded: size(coded) <= most) or best
        return best

    def _corrected(self, site: Site) -> Site:
        """Return a site whose sizes follow those that were measured: each by the nearest of them."""
        known = [i for i in range(len(site.nbytes)) if (site.name, i) in self._made]
        if not known:
            return site
        ratio = {i: len(self._made[site.name, i].data) / site.nbytes[i] for i in known}
        nearest = [_nearest(known, i) for i in range(len(site.nbytes))]
        nbytes = [ratio[k] * n for k, n in zip(nearest, site.nbytes, strict=True)]
        return Site(site.name, site.costs, tuple(_falling(nbytes)))

    def _settled(self, sites: Sequence[Site], most: float, fits: Callable[[Entries], bool]) -> Entries | None:
        """Return the best of what was coded so far that fits, if any: all sizes are known."""
        known = [[i for i in range(len(s.nbytes)) if (s.name, i) in self._made] for s in sites]
        exact = [
            Site(s.name, tuple(s.costs[i] for i in own), tuple(len(self._made[s.name, i].data) for i in own))
            for s, own in zip(sites, known, strict=True)
        ]
        if sum(min(s.nbytes) for s in exact) > most:
            return None
        chosen = ByteBudget(most).choose(exact)
        found = self.coded(sites, [own[i] for own, i in zip(known, chosen, strict=True)])
        return found if fits(found) else None

    def coded(self, sites: Sequence[Site], chosen: Sequence[int]) -> Entries:
        """Return entries of the sites at their choices."""
        found = Entries()
        for site, choice in zip(sites, chosen, strict=True):
            made = self._made.get((site.name, choice))
            found[site.name] = made or self._entry(self._model.matrix(site.name), choice)
        return found

    def _entry(self, matrix: Matrix, choice: int) -> PackedTensor:
        made = pack_entry(stepped(matrix, choice, self._model.feedback))
        self._made[matrix.name, choice] = made
        return made


def _nearest(known: Sequence[int], choice: int) -> int:
    return min(known, key=lambda k: abs(k - choice))


def _falling(nbytes: Sequence[float]) -> list[float]:
    """Return sizes of which none, from the finest choice to the coarsest, is above the one before it.

    >>> _falling([9.0, 4.0, 5.0])
    [9.0, 4.0, 4.0]
    """
    return list(accumulate(nbytes, min))


def to_width(model: Model, bits: float) -> Entries:
    """Return entries of fixed widths that take ``bits`` a coded weight in memory, scales included, or less.

    Where that is less than the least width takes, all have that.
    """
    sites = [grouped_site(model.matrix(name)) for name in model.coded]
    least = sum(min(site.nbytes) for site in sites)
    chosen = ByteBudget(max(bits * model.weights / 8, least)).choose(sites)
    coded = {
        name: pack_entry(grouped(model.matrix(name), choice, model.feedback))
        for name, choice in zip(model.coded, chosen, strict=True)
    }
    return model.in_order(model.kept() | coded)


def at_width(model: Model, width: int) -> Entries:
    """Return entries of one width for all, each weight rounded alone: what others are compared with."""
    coded = {name: pack_entry(nearest(model.matrix(name), width)) for name in model.coded}
    return model.in_order(model.kept() | coded)


class NextVersion(NamedTuple):
    """Entries of a model by the plan of an earlier version, and the names of those that it did not fit."""

    entries: Entries
    renewed: list[str]


def like(model: Model, old: Mapping[str, PackedTensor]) -> NextVersion:
    """Return entries with the steps of an earlier version's, and its codes where they are near enough.

    What grew or shrank so that these do not fit it any more gets steps of its own.
    Errors: ``InputError`` where the tensors are others; ``PayloadError``.
    """
    strange = sorted(set(model.tensors) ^ set(old))
    told = f"{strange[0] if strange else ''!s} is in one of both models alone; pack this one anew"
    require(not strange, InputError, told)
    plans = {name: unpack_entry(entry, name) for name, entry in old.items()}
    found, changed = Entries(), list[str]()
    for name in model.tensors:
        coded = _like(model, name, plans)
        found[name] = pack_entry(coded)
        changed += [name] if _has_other_steps(coded, plans[name]) else []
    return NextVersion(found, changed)


def _has_other_steps(new: Coded, old: Coded) -> bool:
    if isinstance(new, Grouped) and isinstance(old, Grouped):
        other = new.scales != old.scales
        return new.power != old.power or int(other.sum()) > SOME * other.numel()
    if isinstance(new, Stepped) and isinstance(old, Stepped):
        same = torch.equal(new.row_parts, old.row_parts) and torch.equal(new.column_parts, old.column_parts)
        return new.power != old.power or not same
    return False


def _like(model: Model, name: str, plans: Mapping[str, Coded]) -> Coded:
    known = plans[name]
    if isinstance(known, Tied) and model.same.get(name) == known.name:
        return known
    # What was one tensor and is two now goes on from the same codes.
    old = plans[known.name] if isinstance(known, Tied) else known
    if isinstance(old, Tied):
        raise PayloadError(f"{name:.99} is the same as one that has no values")
    x = model.tensors[name]
    require(
        tuple(x.shape) == old.shape, InputError, f"{name} has another shape than before; pack this model anew"
    )
    if isinstance(old, Plain):
        return Plain(x)
    codable = x.is_floating_point() and x.dtype.itemsize > 1
    require(codable, InputError, f"{name} is {x.dtype} now and was {old.dtype}; pack this model anew")
    return _near(model.matrix(name, old.swapped), old, model.feedback)


def _near(matrix: Matrix, old: Stepped | Grouped, feedback: bool) -> Coded:
    if isinstance(old, Grouped):
        return with_scales(matrix, old, feedback)
    found = renewed(matrix, old, feedback)
    if found is None:
        found = with_steps(matrix, old.row_parts, old.column_parts, feedback, old.codes)
    return replace(found, wide=found.wide or old.wide)
