"""Recipes of parallel diffusion: how the work is divided over the ranks, and what they exchange is sent.

In docstrings [quoted] is what the named paper says, [source] what was read in its code, [derived] our
reading, [measured] what we measured.

>>> parse_diffusion_recipe("compact:bits=2").name
'compact:bits=2'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from thinwire.channels.channel import Scheme
from thinwire.channels.memory import Delta, Memory, SecondOrderDelta
from thinwire.choosing.registry import Parameter, Registry
from thinwire.codecs import Cast, Codec, LowRank, RankOne, Uniform
from thinwire.links.mesh import Peer
from thinwire.uses.pictures.agreement import Parallel, check_given, refused
from thinwire.uses.pictures.coding import FP16, MAX_WARMUP, Coding
from thinwire.uses.pictures.context_parallel.modes import SPACE, TIME, Division
from thinwire.uses.pictures.context_parallel.parallel import over_ranks
from thinwire.uses.pictures.context_parallel.pipefusion import MOST_PATCHES

if TYPE_CHECKING:
    from torch import nn


ATTENTION, OUTPUT = "attention", "output"  # the roles: keys and values of a layer; the joined output
DIFFUSION = Registry[Coding, Division]("diffusion", (ATTENTION, OUTPUT), (Coding,))
parse_diffusion_recipe = DIFFUSION.parse
Made = tuple[Mapping[str, Coding], Division]
BITS = Parameter("the bits of a value of a residual", 1, 2)
WARMUP = Parameter("how many steps at first wait for all, in 8 or 16 bits", 1, MAX_WARMUP)
EARLY = Parameter("how many steps after those are sent in more bits, 8 at most", 0, MAX_WARMUP)
ORDER = Parameter("whether residuals are of values, or of their change from step to step", 1, 2)
PATCHES = Parameter("into how many parts the picture is cut; 0 chooses by its size", 0, MOST_PATCHES)
OVER = Parameter("whether a video's patches are some of its frames, or a part of each", choices=(TIME, SPACE))
CHAIN = Parameter("whether each frame's residual is coded against that of the frame before: 1 or 0", 0, 1)
OVERLAP = Parameter("the percent of its part by which a rank reaches over each neighbour's", 0, 100)
PIPE_BITS = Parameter("the bits of a value of a residual", 1, 8)
DECAY = {1: 0.625, 2: 0.75}  # by bits: what is decoded more coarsely says less of how values move
RANK = Parameter("the rank of the factors of a residual", 1, 64)


@DIFFUSION.register("one", "Each rank computes everything: one device, by itself.", "none")
def one() -> Made:
    """Send nothing."""
    return raw().schemes, Division("one")


@DIFFUSION.register("raw", "Values as they are: the picture of one device.", "none")
def raw() -> dict[str, Coding]:
    """Send keys, values and outputs in the model's own type."""
    return {ATTENTION: Coding(), OUTPUT: Coding()}


@DIFFUSION.register("fp16", "Values as float16: the baseline.", "common practice")
def fp16() -> dict[str, Coding]:
    """Send keys, values and outputs as float16."""
    return {ATTENTION: Coding(FP16), OUTPUT: Coding(FP16)}


@DIFFUSION.register("int8", "Values in 8 bits, each step anew.", "common practice")
def int8() -> dict[str, Coding]:
    """Send keys and values as 8-bit integers with a scale for 32 values, and outputs as float16."""
    return {ATTENTION: Coding(Scheme(Uniform(8))), OUTPUT: Coding(FP16)}


@DIFFUSION.register(
    "displaced", "The others' values of the last step: a baseline.", "DistriFusion, arXiv 2402.19481"
)
def displaced(warmup: Annotated[int, WARMUP] = 1) -> Made:
    """Send as float16, and use keys and values a step later, but for some steps at first.

    Source: own values fresh, outputs of the same step [source]; 4 warm-up steps by default in its code [from
    memory]. One, as ``compact`` has, makes the two comparable.
    """
    return {ATTENTION: Coding(FP16, warmup), OUTPUT: Coding(FP16)}, Division("displaced")


@DIFFUSION.register(
    "compact", "What has changed since the last step, in 1 or 2 bits.", "CompactFusion, arXiv 2507.17511"
)
def compact(
    bits: Annotated[int, BITS] = 1,
    warmup: Annotated[int, WARMUP] = 1,
    order: Annotated[int, ORDER] = 2,
    early: Annotated[int, EARLY] = 7,
) -> dict[str, Coding]:
    """Send residuals as signs or four levels times a scale a row and a column, after some more exact steps.

    Source: error feedback by references of what was decoded, 1 warm-up step for images, first order [source],
    which is ``order=1,early=0``; own keys and values exact, as in its ring [source]. Ours [measured]: the
    decay of the second order, the first step in 8 bits, more bits in early steps, and outputs as residuals
    in 6 bits.
    """
    change = Delta() if order == 1 else SecondOrderDelta(DECAY[bits])
    return _residuals(RankOne(bits), change, warmup, RankOne(2) if bits == 1 else Uniform(4, group=64), early)


@DIFFUSION.register(
    "lowrank",
    "What has changed since the last step, as a matrix of low rank.",
    "CompactFusion, arXiv 2507.17511",
)
def lowrank(rank: Annotated[int, RANK] = 8, warmup: Annotated[int, WARMUP] = 1) -> dict[str, Coding]:
    """Send residuals of keys and values as two factors of 8-bit integers, after some more exact steps.

    Source: rank 8, 12 or 16 with first order and error feedback [source]; integers are ours.
    """
    return _residuals(LowRank(rank), Delta(), warmup)


@DIFFUSION.register(
    "ulysses",
    "Each rank has all tokens and a share of the heads: a baseline.",
    "DeepSpeed-Ulysses, 2309.14509",
)
def ulysses() -> Made:
    """Send queries, keys, values, what attention returns and outputs as float16.

    Source: uncoded in the comparisons of CompactFusion, arXiv 2507.17511 [source].
    """
    return fp16().schemes, Division("ulysses")


@DIFFUSION.register(
    "guidance",
    "Each of two ranks computes one of the two forward passes of a step: exact.",
    "common practice",
)
def guidance() -> Made:
    """Send outputs as they are."""
    return raw().schemes, Division("guidance")


@DIFFUSION.register(
    "pipe-fp16", "Blocks over the ranks, the picture in patches, as float16.", "PipeFusion, arXiv 2405.14430"
)
def pipe_fp16(
    warmup: Annotated[int, WARMUP] = 1,
    patches: Annotated[int, PATCHES] = 0,
    over: Annotated[str, OVER] = TIME,
) -> Made:
    """Send the hidden states of patches, and outputs, as float16.

    Source: patches, and keys and values of their last turn [quoted]. All patches of a step are awaited before
    the next step begins [ours]: the caller's loop stays as it is.
    """
    return {ATTENTION: Coding(FP16, warmup), OUTPUT: Coding(FP16)}, Division("pipe", patches, over=over)


@DIFFUSION.register(
    "compact-pipe", "As pipe-fp16, in a few bits: what has changed at each patch since the last step.", "ours"
)
def compact_pipe(
    bits: Annotated[int, PIPE_BITS] = 4,
    warmup: Annotated[int, WARMUP] = 1,
    patches: Annotated[int, PATCHES] = 0,
    order: Annotated[int, ORDER] = 2,
    early: Annotated[int, EARLY] = 5,
    over: Annotated[str, OVER] = TIME,
    chain: Annotated[int, CHAIN] = 1,
) -> Made:
    """Send what has changed in the hidden state of a patch since its last turn, 4 bits by default [ours].

    Where a patch has whole frames of a video, each is coded against what the one before it decodes to.
    """
    codec = RankOne(bits) if bits <= 4 else Uniform(bits, group=64)
    change = Delta() if order == 1 else SecondOrderDelta(0.75)
    made = _residuals(codec, change, warmup, Uniform(8, group=64), early)
    return made, Division("pipe", patches, chained=chain, over=over)


@DIFFUSION.register(
    "latent",
    "Each rank makes a part of the video, cut along time, height and width in turn.",
    "Latent Parallelism, arXiv 2512.07350",
)
def latent(overlap: Annotated[int, OVERLAP] = 25) -> Made:
    """Send outputs of overlapping parts as float16; they are joined by weights that fall towards the edges.

    Source: the rotation of the axis, parts that end between patches, and overlaps joined by place [quoted].
    How wide the overlap is, and that weights fall evenly, is ours.
    """
    return fp16().schemes, Division("latent", overlap=overlap)


@DIFFUSION.register(
    "batch", "Each rank makes pictures of its own: exact, and nothing is sent.", "common practice"
)
def batch() -> Made:
    """Send nothing: whose picture is whose, the caller decides."""
    return raw().schemes, Division("batch")


def _residuals(
    codec: Codec, change: Memory, warmup: int, finer: Codec | None = None, early: int = 0
) -> dict[str, Coding]:
    first = Scheme(codec, change, keyframe=Uniform(8, group=64))
    output = Scheme(Uniform(6, scale="token"), Delta(), keyframe=Cast("float16"))
    return {ATTENTION: Coding(first, warmup, finer, early), OUTPUT: Coding(output, warmup)}


def division_of(recipe: str) -> Division:
    """Return how a recipe divides the work.

    >>> division_of("compact").mode, division_of("compact-pipe").mode
    ('gather', 'pipe')
    """
    return parse_diffusion_recipe(recipe).policy or Division()


@contextmanager
def parallel(
    model: nn.Module,
    peers: Mapping[int, Peer],
    recipe: str = "compact",
    mode: str | None = None,
    *,
    deadline: float = 60.0,
    plan: Mapping[str, Any] | None = None,
) -> Iterator[Parallel]:
    """Run a transformer of diffusers over this rank and ``peers`` inside the block; leave it as it was.

    - ``model``: a ``FluxTransformer2DModel``, ``WanTransformer3DModel`` or another with a plan for how to
      split it, with the same weights on all ranks;
    - ``peers``: links of ``connect_mesh`` to all other ranks;
    - ``recipe``: how what the ranks exchange is sent, and in which mode: see ``thinwire recipes``;
    - ``mode``: the recipe's own unless given. ``gather``: each rank computes its share of the tokens, with
      the keys and values of all; ``displaced``: with those of the others a step ago; ``ulysses``: for
      attention, all tokens and its share of the heads; ``guidance``: each of two ranks computes one of the
      two forward passes of a step; ``batch``: each rank makes pictures of its own, from inputs of its own;
      ``one``: each rank computes everything. The last two send nothing;
    - ``plan``: how the tokens are split, as diffusers writes it in ``_cp_plan``; only for a model whose plan
      is not known here (pictures.md has the list), or is other than you want;
    - ``deadline``: seconds without any data after which a wait for a rank fails.

    But in mode ``batch``, all ranks make the same calls, with the same inputs: noise comes from one generator
    on the CPU, with one seed. Every rank gets the same picture, bit for bit::

        with thinwire.parallel(pipe.transformer, peers, "compact:bits=2,warmup=2"):
            picture = pipe(prompt, generator=torch.Generator().manual_seed(0)).images[0]

    Errors: ``InputError``, one sentence, for a model that cannot be split so, and for ranks or inputs that
    are not alike; ``LinkError`` naming a rank that is lost, silent, or ended with an error.
    """
    with refused(peers, "diffusion"):
        check_given(model, recipe, deadline)
        found = parse_diffusion_recipe(recipe)
    division, schemes = division_of(recipe), found.schemes
    division = division if mode is None else replace(division, mode=mode)
    with over_ranks(model, peers, schemes[ATTENTION], schemes[OUTPUT], division, deadline, plan) as made:
        yield made
