"""A model's tensors to entries: within bytes, within bits in memory, or like an earlier version."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from thinwire.assets.weights.choices import (
    WIDTHS,
    Matrix,
    grouped,
    grouped_site,
    stepped,
    stepped_site,
    with_scales,
    with_steps,
)
from thinwire.assets.weights.entry import Entry, pack_entry, unpack_entry
from thinwire.assets.weights.model import Model
from thinwire.assets.weights.tensors import Coded, Grouped, Plain, Same, Stepped
from thinwire.policies.allocate import ByteBudget, Site
from thinwire.types import InputError, require

WITHIN = 0.004  # of a budget: less is not worth another round
ROUNDS = 6
SURE = 1.03  # times the estimate of the smallest size, to name one that will do
Entries = dict[str, Entry]


def to_budget(model: Model, most: int, size: Callable[[Entries], int]) -> Entries:
    """Return entries of all tensors whose ``size`` as a file is ``most`` or a little less.

    All as they are where that fits. Sizes are estimated, coded, measured and corrected.
    Errors: ``InputError`` that names a size that will do.
    """
    kept, sites = model.kept(), [stepped_site(model.matrix(name)) for name in model.coded]
    if sum(max(site.nbytes) for site in sites) <= most:
        whole = model.lossless()
        if size(whole) <= most:
            return whole
    rest = size(kept)
    least = math.ceil(rest + SURE * sum(min(site.nbytes) for site in sites))
    told = f"the model takes {least} bytes at least, and {most} are asked for; ask for {least} or more"
    require(least <= most, InputError, told)
    found = _searched(model, sites, most, rest, lambda coded: size(kept | coded))
    return {name: (kept | found)[name] for name in model.tensors}


def _searched(
    model: Model, sites: Sequence[Site], most: int, rest: float, size: Callable[[Entries], int]
) -> Entries:
    """Return entries of the coded tensors: choose, code, see what they take and choose again."""
    made, best, spare = dict[tuple[str, int], Entry](), Entries(), 0.0
    before, ratios = list[int](), dict.fromkeys(model.coded, 1.0)
    for _ in range(ROUNDS):
        scaled = [Site(s.name, s.costs, tuple(ratios[s.name] * n for n in s.nbytes)) for s in sites]
        floor = sum(min(s.nbytes) for s in scaled)
        chosen = ByteBudget(max(most - rest - spare, floor)).choose(scaled)
        for site, choice in zip(sites, chosen, strict=True):
            if (site.name, choice) not in made:
                coded = stepped(model.matrix(site.name), choice, model.feedback)
                made[site.name, choice] = pack_entry(coded)
            ratios[site.name] = len(made[site.name, choice].data) / max(site.nbytes[choice], 1.0)
        found = {site.name: made[site.name, i] for site, i in zip(sites, chosen, strict=True)}
        nbytes = size(found)
        rest = nbytes - sum(len(entry.data) for entry in found.values())
        if nbytes <= most and nbytes >= size(best):
            best = found
        if chosen == before or (1 - WITHIN) * most <= nbytes <= most:
            break
        before, spare = chosen, max(0.0, spare + nbytes - most)
    told = f"the model takes {nbytes} bytes so, and {most} are asked for; ask for {nbytes} or more"
    require(bool(best) or not sites, InputError, told)
    return best


def to_width(model: Model, bits: float) -> Entries:
    """Return entries of fixed widths that take ``bits`` a coded weight in memory, scales included, or less.

    Errors: ``InputError`` that names the least there is.
    """
    matrices = [model.matrix(name) for name in model.coded]
    sites = [grouped_site(matrix) for matrix in matrices]
    weights = max(model.weights, 1)
    least = sum(min(site.nbytes) for site in sites) * 8 / weights
    told = f"{WIDTHS[0]}-bit codes and their scales take {least:.3f} bits a weight, not {bits:g}"
    require(bits >= least, InputError, f"{told}; ask for that or more")
    chosen = ByteBudget(bits * weights / 8).choose(sites)
    coded = {
        matrix.name: pack_entry(grouped(matrix, choice, model.feedback))
        for matrix, choice in zip(matrices, chosen, strict=True)
    }
    return {name: (model.kept() | coded)[name] for name in model.tensors}


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
