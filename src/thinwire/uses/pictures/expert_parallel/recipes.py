"""Recipes of experts over several ranks: when a layer waits for the others, and how tokens are sent.

In docstrings [quoted] is what the named paper says, [source] what was read in its code, [derived] our
reading, [measured] what we measured.

>>> parse_experts_recipe("dice:stride=1").policy
Schedule(mode='interweaved', synced='shallow')
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from thinwire.channels.channel import Scheme
from thinwire.channels.memory import Delta
from thinwire.choosing.registry import Parameter, Registry
from thinwire.codecs import Codec, RankOne, Rows, Uniform
from thinwire.links.mesh import Peer
from thinwire.uses.pictures.agreement import check_given, refused
from thinwire.uses.pictures.coding import FP16, MAX_WARMUP, Coding
from thinwire.uses.pictures.expert_parallel.routing import (
    BATCH,
    DISPLACED,
    INTERWEAVED,
    ONE,
    SYNC,
    SYNCED,
    Experts,
    Schedule,
    over_experts,
)

if TYPE_CHECKING:
    from torch import nn

DISPATCH, COMBINE = "dispatch", "combine"  # the roles: tokens to experts; what these have made of them
EXPERTS = Registry[Coding, Schedule]("experts", (DISPATCH, COMBINE), (Coding,))
parse_experts_recipe = EXPERTS.parse

Made = tuple[Mapping[str, Coding], Schedule]
FORMS = {
    "own": Scheme(),
    "fp16": FP16,
    "int8": Scheme(Uniform(8, group=64)),
    "int4": Scheme(Uniform(4, group=64)),
}
VALUES = Parameter("how values are sent: in the model's own type, or in fewer bits", choices=tuple(FORMS))
MODE = Parameter("how stale outputs are: one step, two, or none", choices=(INTERWEAVED, DISPLACED))
ANY_MODE = Parameter(MODE.meaning, choices=(INTERWEAVED, DISPLACED, SYNC))
LAYERS = Parameter("which layers wait for the outputs of this very step", choices=SYNCED)
STRIDE = Parameter("every how many steps a token also goes to the second of its experts", 1, MAX_WARMUP)
WARMUP = Parameter("how many steps at first wait, and send everything", 1, MAX_WARMUP)
BITS = Parameter("the bits of a value of a residual", 1, 8)
EARLY = Parameter("how many steps after the first ones are sent in 8 bits", 0, MAX_WARMUP)


def _alike(coding: Coding) -> dict[str, Coding]:
    return {DISPATCH: coding, COMBINE: coding}


@EXPERTS.register("one", "One rank computes everything.", "none")
def one() -> Made:
    """Send nothing."""
    return _alike(Coding()), Schedule(ONE)


@EXPERTS.register(
    "batch", "Each rank has all experts, and makes pictures of its own: exact.", "common practice"
)
def batch() -> Made:
    """Send nothing: what to do where one rank's memory has room for the whole model."""
    return _alike(Coding()), Schedule(BATCH)


@EXPERTS.register("ep-sync", "Tokens go to their experts' ranks and back, awaited.", "GShard, 2006.16668")
def ep_sync(values: Annotated[str, VALUES] = "fp16") -> Made:
    """Send as float16; ``values=own`` is the picture of one device.

    A token goes to a rank once, also where both of its experts are there [ours].
    """
    return _alike(Coding(FORMS[values])), Schedule()


@EXPERTS.register(
    "ep-displaced", "Outputs of two steps ago, never awaited: a baseline.", "DICE, arXiv 2411.16786"
)
def ep_displaced(values: Annotated[str, VALUES] = "fp16", warmup: Annotated[int, WARMUP] = 1) -> Made:
    """Use the outputs of two steps ago, but for some steps at first.

    Source: tokens of a step are computed in the next one, and combined in the one after [source]. Own
    experts' outputs are of this step, and weights of the gate too, its ``ep-score-use-latest`` [ours].
    """
    return _alike(Coding(FORMS[values])), Schedule(DISPLACED, warmup=warmup)


@EXPERTS.register("dice", "Outputs of one step ago; second experts at some steps.", "DICE, arXiv 2411.16786")
def dice(
    values: Annotated[str, VALUES] = "fp16",
    mode: Annotated[str, MODE] = INTERWEAVED,
    synced: Annotated[str, LAYERS] = "shallow",
    stride: Annotated[int, STRIDE] = 2,
    warmup: Annotated[int, WARMUP] = 1,
) -> Made:
    """Send as float16, by DICE's three parts, each of which can be left out.

    ``mode=displaced`` is without interweaving, ``synced=none`` without selective synchronisation,
    ``stride=1`` without conditional communication. Source: the three, stride 2, which layers wait an
    argument [source]; second experts on the own rank are always computed [ours]. Where the second half of
    flux-fashion-moe's two layers waits, pictures are 0.9 dB nearer [measured].
    """
    return _alike(Coding(FORMS[values])), Schedule(mode, synced, stride, warmup)


@EXPERTS.register("dice-residual", "As dice, in a few bits: what has changed at each token.", "ours")
def dice_residual(
    bits: Annotated[int, BITS] = 4,
    mode: Annotated[str, ANY_MODE] = INTERWEAVED,
    synced: Annotated[str, LAYERS] = "shallow",
    stride: Annotated[int, STRIDE] = 2,
    warmup: Annotated[int, WARMUP] = 1,
    early: Annotated[int, EARLY] = 0,
) -> Made:
    """Send what has changed in a token, and in what an expert makes of it, since it last went there [ours].

    A row that goes for the first time goes in 8 bits. Of first order: a row that is not sent stays as it is
    at both ends, and does not go on moving.
    """
    codec: Codec = RankOne(bits) if bits < 3 else Uniform(bits, group=64)
    scheme = Scheme(Rows(codec), Delta(), keyframe=Rows(Uniform(8, group=64)))
    coding = Coding(scheme, 0, Rows(Uniform(8, group=64)) if early else None, early)
    return _alike(coding), Schedule(mode, synced, stride, warmup)


def schedule_of(recipe: str) -> Schedule:
    """Return when the layers of a recipe wait.

    >>> schedule_of("ep-sync").mode
    'sync'
    """
    return parse_experts_recipe(recipe).policy or Schedule()


@contextmanager
def spread_experts(
    model: nn.Module,
    peers: Mapping[int, Peer],
    recipe: str = "dice-residual",
    *,
    owners: Sequence[int] | None = None,
    deadline: float = 60.0,
) -> Iterator[Experts]:
    """Spread the experts of a transformer of diffusers over this rank and ``peers`` in the block.

    - ``model``: with HiDream's or NucleusMoE's layers of experts, and the same weights on all ranks.
      HiDream's experts of other ranks may be on the device ``meta``;
    - ``peers``: links of ``connect_mesh`` to all other ranks;
    - ``recipe``: when layers wait, and how tokens are sent: see ``thinwire recipes``;
    - ``owners``: the rank of each expert; dealt out in turn unless given;
    - ``deadline``: seconds without any data after which a wait for a rank fails.

    Each rank makes pictures of its own, as many as it likes, and all make as many calls, at the same times::

        with thinwire.spread_experts(pipe.transformer, peers, "dice-residual"):
            pictures = pipe(prompts[rank::world], generator=generators[rank::world]).images

    Errors: ``InputError``, one sentence, for a model without such layers, and for ranks or times that are not
    alike; ``LinkError`` naming a rank that is lost, silent, or ended with an error.
    """
    with refused(peers, "experts"):
        check_given(model, recipe, deadline)
        found = parse_experts_recipe(recipe)
    schemes, schedule = found.schemes, found.policy or Schedule()
    entered = over_experts(model, peers, schemes[DISPATCH], schemes[COMBINE], schedule, owners, deadline)
    with entered as made:
        yield made
