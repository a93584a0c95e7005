"""Recipes: what crosses a stage boundary each way, one short function per published system, and ours.

Written ``name:parameter=value,...`` on the command line, as in ``aqsgd:fw=4,bw=8``; from Python
``aqsgd(fw=4)``. In docstrings [quoted] is what the named paper says, [source] what was read in its code,
[second-hand] somebody else's notes on a paper, [derived] our reading or arithmetic.

>>> parse_recipe("direct:bits=4").spec
'forward=Scheme(Uniform()), backward=Scheme(Uniform())'
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Annotated

from thinwire.channels.channel import Scheme
from thinwire.channels.memory import Delta, FirstVisit, NoMemory
from thinwire.choosing.policy import BF16, EXACT, Rung
from thinwire.choosing.registry import Parameter, Recipe, Registry
from thinwire.codecs import (
    Cast,
    ChannelMean,
    Codec,
    DeadZone,
    Entropy,
    FixedPoint,
    Raw,
    Sink,
    TileAdaptive,
    Uniform,
)
from thinwire.codecs.deadzone import step_for
from thinwire.types import MissingExtra
from thinwire.uses.training.pipeline.choosing.hide import HideBehindCompute
from thinwire.uses.training.pipeline.choosing.pipeline_policy import BACKWARD, FORWARD, PipelinePolicy

__all__ = ["PIPELINE", "PipelineRecipe", "Recipe", "parse_recipe"]

PIPELINE = Registry[Scheme, PipelinePolicy]("pipeline", (FORWARD, BACKWARD), (Scheme,))
PipelineRecipe = Recipe[Scheme, PipelinePolicy]
parse_recipe = PIPELINE.parse
Pair = dict[str, Scheme]


def _pair(forward: Scheme, backward: Scheme) -> Pair:
    return {FORWARD: forward, BACKWARD: backward}


def _bits(of: str, low: int = 1) -> Parameter:
    return Parameter(f"the bits of {of}", low, 8)


def _accuracy(of: str) -> Parameter:
    return Parameter(f"the accuracy of {of}, in bits of a direct code", 0.5, 8, whole=False)


def _flag(meaning: str) -> Parameter:
    return Parameter(f"1 to {meaning}, 0 not to")


ROUNDING = Parameter("how codes are rounded", choices=("nearest", "stochastic"))
GROUP = Parameter("how many neighbouring values share a scale", 1, 4096)
SCALE = Parameter("what shares a scale", choices=("tensor", "channel", "token", "group"))


@PIPELINE.register("fp32", "Everything as it is: the baseline.", "none")
def fp32() -> Pair:
    """Send tensors uncompressed, 32 bits a value for float32."""
    return _pair(Scheme(), Scheme())


@PIPELINE.register("bf16", "Everything cast to bfloat16.", "common practice")
def bf16() -> Pair:
    """Send the upper half of each float32: 16 bits a value, 8 of them significant."""
    return _pair(Scheme(Cast("bfloat16")), Scheme(Cast("bfloat16")))


@PIPELINE.register(
    "direct", "Quantised as it is, nothing remembered.", "the baseline DirectQ of AQ-SGD, arXiv 2206.01299"
)
def direct(
    bits: Annotated[int, _bits("a value, both ways")] = 8,
    fw: Annotated[int | None, _bits("an activation, instead of bits")] = None,
    bw: Annotated[int | None, _bits("a gradient, instead of bits")] = None,
    group: Annotated[int, GROUP] = 32,
    rounding: Annotated[str, ROUNDING] = "nearest",
) -> Pair:
    """Send integer codes with a scale for each group: ``bits`` + 16 / group bits a value.

    Source: DirectQ in AQ-SGD (Wang et al. 2022, arXiv 2206.01299), with the finer scales of groups.
    """
    forward, backward = (Uniform(b or bits, group=group, rounding=rounding) for b in (fw, bw))
    return _pair(Scheme(forward), Scheme(backward))


@PIPELINE.register(
    "step-delta",
    "INT8 difference to the step before, the first step uncompressed.",
    "the student paper this project began with",
)
def step_delta(
    bits: Annotated[int, _bits("a difference")] = 8,
    scale: Annotated[str, SCALE] = "tensor",
) -> Pair:
    """Send the difference to what stood in the same place of the previous step.

    Source: the student paper: INT8 differences to the previous step, 75 % fewer bytes [quoted]. Differences
    both ways, since 75 % needs 8 bits of 32 in both; an uncompressed first step; a scale a tensor [derived].
    Consecutive steps see different samples: the difference has twice the variance of the tensor about its
    mean, so at equal bits a code of the centred tensor is better [derived].
    """
    scheme = Scheme(Uniform(bits, scale), Delta("step"))
    return _pair(scheme, scheme)


@PIPELINE.register(
    "aqsgd",
    "AQ-SGD as published: first visits in full, then deltas by sample; gradients direct.",
    "arXiv 2206.01299, algorithm and theorem",
)
def aqsgd(
    fw: Annotated[int, _bits("an activation's delta")] = 4,
    bw: Annotated[int, _bits("a gradient")] = 8,
    rounding: Annotated[str, ROUNDING] = "stochastic",
) -> Pair:
    """Send m(s) in full at the first visit of sample s, then Q(a(s) - m(s)), and both ends add it to m(s).

    Source: AQ-SGD (Wang et al. 2022, arXiv 2206.01299): Q unbiased, as its theorem asks [quoted]; one scale a
    channel and micro-batch [source: its code]; gradients quantised directly from the first step on [quoted].
    """
    forward, backward = (Uniform(b, "channel", rounding=rounding) for b in (fw, bw))
    return _pair(Scheme(forward, Delta()), Scheme(backward))


@PIPELINE.register(
    "aqsgd-code",
    "AQ-SGD as its released code does it: fixed point, first epoch uncompressed both ways.",
    "DS3Lab/AC-SGD at 95a0f2e",
)
def aqsgd_code(
    fw: Annotated[int, _bits("an activation's delta", 2)] = 4,
    bw: Annotated[int, _bits("a gradient", 2)] = 8,
) -> Pair:
    """Send what AQ-SGD's released code sends: see ``FixedPoint`` for its quantiser.

    Source: DS3Lab/AC-SGD at 95a0f2e: round to nearest, one float16 scale a channel, references in float16,
    the first epoch in full both ways [source]. There an epoch's flag switches compression on; here it is each
    sample's first visit, the same where an epoch is a pass over all samples. Gradient scales are bfloat16,
    which stands for the loss scaling of training in float16 [derived].
    """
    forward = Scheme(FixedPoint(fw), Delta(), references=Cast("float16"))
    return _pair(forward, Scheme(FixedPoint(bw, "bfloat16"), FirstVisit()))


@PIPELINE.register(
    "tahquant",
    "TAH-Quant: tiles of 3 or 4 bits by entropy, outliers turned away; gradients direct.",
    "arXiv 2506.01352",
)
def tahquant(
    bw: Annotated[int, _bits("a gradient")] = 6,
    high: Annotated[int, _bits("an activation in a flat tile")] = 4,
    low: Annotated[int, _bits("an activation in a spiky tile")] = 3,
    share: Annotated[float, Parameter("the share of the tiles that get high bits", 0, 1, whole=False)] = 0.8,
    tile: Annotated[int, Parameter("channels in a tile, a power of two", 2, 256)] = 64,
    threshold: Annotated[
        float, Parameter("how many times the second magnitude an outlier is", 1, 1e9, whole=False)
    ] = 2.0,
    scale: Annotated[str, SCALE] = "channel",
) -> Pair:
    """Send activations by ``TileAdaptive``, which remembers nothing, and gradients in plain low bits.

    Source: TAH-Quant (He et al. 2025, arXiv 2506.01352) [second-hand]: 80 % of the tiles at 4 bits and 20 %
    at 3, about 4.41 bits a value with all metadata; gradients by a plain quantiser of 6 to 8 bits. A scale
    and a zero-point of 16 bits a tile make 4.41 with tiles of 64; a gradient scale a channel is our reading
    [derived].
    """
    return _pair(Scheme(TileAdaptive(tile, high, low, share, threshold)), Scheme(Uniform(bw, scale)))


REFERENCES: dict[str, Codec] = {"int8": Uniform(8), "float16": Cast("float16"), "float32": Raw()}
MEMORY = Parameter("whether both ends remember each sample, or nothing", choices=("sample", "none"))
DITHER = _flag("code gradients without bias, by noise that the receiver takes off again")
CLIP = Parameter("the share of a group's peak that the top level stands for", 0.05, 1, whole=False)


@PIPELINE.register(
    "thinwire",
    "Ours: coded first visits, then what changed, at an even error; gradients coded directly.",
    "docs/recipes.md; builds on arXiv 2206.01299",
)
def thinwire(
    first: Annotated[float, _accuracy("an activation at its first visit")] = 3.0,
    fw: Annotated[float, _accuracy("an activation later")] = 3.7,
    bw: Annotated[float, _accuracy("a gradient")] = 2.4,
    gdelta: Annotated[int, _flag("send gradients as deltas by sample too")] = 0,
    dither: Annotated[int, DITHER] = 1,
    memory: Annotated[str, MEMORY] = "sample",
    sink: Annotated[int, Parameter("positions in front coded at 8 bits at a first visit", 0, 64)] = 1,
    mean: Annotated[int, _flag("send the channels' means apart at a first visit")] = 1,
    refs: Annotated[str, Parameter("how references are held", choices=tuple(REFERENCES))] = "int8",
) -> Pair:
    """Send first visits coded, revisits as deltas by sample, gradients directly, at an even error.

    The delta of AQ-SGD (arXiv 2206.01299), but the first visit is coded too: its error is part of the next
    visit's delta. The first token of a sequence (an attention sink) and the channels' means, which carry most
    of the energy, travel apart. One step a message and an entropy coder (``DeadZone``); a delta's step
    follows from the tensor it belongs to, so each visit errs alike, and costs the less the less has changed.
    Parameters in bits say how accurate: as a direct code of so many bits. ``gdelta`` sends gradients as
    deltas too, which saves most where fine-tuning changes little. ``dither`` codes them without bias, so
    that far fewer bits do: see ``DeadZone``. ``memory="none"`` codes each visit as a first one, for data seen
    once. Errors: ``MissingExtra`` without zstandard.
    """
    _need_zstandard("thinwire", 1)

    def coded(bits: float, unit: str = "message") -> Codec:
        return Entropy(DeadZone(step_for(bits), unit=unit))

    def gradient(unit: str = "message") -> Codec:
        step = step_for(bw)
        return Entropy(DeadZone(step, 0.5, unit, dither=True)) if dither else coded(bw, unit)

    keyframe = ChannelMean(coded(first)) if mean else coded(first)
    if sink:
        keyframe = Sink(keyframe, positions=sink)
    if memory == "none":
        return _pair(Scheme(keyframe), Scheme(gradient()))
    held, backward = REFERENCES[refs], Scheme(gradient())
    if gdelta:
        backward = Scheme(gradient("tensor"), Delta(), gradient(), held)
    return _pair(Scheme(coded(fw, "tensor"), Delta(), keyframe, held), backward)


@PIPELINE.register(
    "thinwire-groups",
    "Ours, with a fixed number of bits and a scale a group; works without an entropy coder.",
    "docs/recipes.md; builds on arXiv 2206.01299",
)
def thinwire_groups(
    first: Annotated[int, _bits("an activation at its first visit")] = 4,
    fw: Annotated[int, _bits("an activation's delta")] = 2,
    bw: Annotated[int, _bits("a gradient")] = 3,
    group: Annotated[int, GROUP] = 32,
    rounding: Annotated[str, replace(ROUNDING, meaning="how gradients are rounded")] = "nearest",
    scales: Annotated[str, Parameter("how a scale is stored", choices=("e5m3", "bfloat16"))] = "e5m3",
    entropy: Annotated[int, _flag("entropy-code the codes")] = 1,
    sink: Annotated[int, Parameter("positions in front coded at 8 bits at a first visit", 0, 64)] = 1,
    mean: Annotated[int, _flag("send the channels' means apart at a first visit")] = 1,
    fclip: Annotated[float, replace(CLIP, meaning=f"{CLIP.meaning}, for deltas")] = 0.6,
    bclip: Annotated[float, replace(CLIP, meaning=f"{CLIP.meaning}, for gradients")] = 0.8,
    gdelta: Annotated[int, _flag("send gradients as deltas by sample too")] = 0,
    refs: Annotated[str, Parameter("how references are held", choices=tuple(REFERENCES))] = "int8",
) -> Pair:
    """Send first visits coded, revisits as deltas by sample, gradients directly, with group scales.

    Forward: the delta of AQ-SGD (arXiv 2206.01299), but the first visit is coded too: its error is part of
    the next visit's delta. The first token of a sequence (an attention sink) and the channels' means, which
    carry most of the energy, travel apart. References are held as int8 at both ends. Gradients carry no
    memory, unless ``gdelta``. Codes have a one-byte scale a group and pass through an entropy coder.
    Errors: ``MissingExtra`` without zstandard, unless ``entropy=0``.
    """
    _need_zstandard("thinwire-groups", entropy)

    def coded(bits: int, rounding: str = "nearest", clip: float = 1.0) -> Codec:
        code = Uniform(bits, group=group, rounding=rounding, scale_dtype=scales, clip=clip)
        return Entropy(code) if entropy else code

    keyframe = ChannelMean(coded(first)) if mean else coded(first)
    if sink:
        keyframe = Sink(keyframe, positions=sink)
    held = REFERENCES[refs]
    gradient = coded(bw, rounding, bclip)
    backward = Scheme(
        gradient, Delta() if gdelta else NoMemory(), gradient if gdelta else Raw(), held if gdelta else Raw()
    )
    return _pair(Scheme(coded(fw, clip=fclip), Delta(), keyframe, held), backward)


def _need_zstandard(recipe: str, entropy: int) -> None:
    if entropy and importlib.util.find_spec("zstandard") is None:
        raise MissingExtra(
            f"recipe {recipe} needs zstandard: pip install 'thinwire[entropy]', "
            "or take thinwire-groups:entropy=0"
        )


FINER = (0.0, 1.0, 2.0, 3.5)  # bits of accuracy above the floor


@PIPELINE.register("auto", "Ours, as accurate as hides behind compute, step by step.", "docs/auto.md")
def auto(
    first: Annotated[float, _accuracy("an activation at its first visit, at least")] = 1.9,
    fw: Annotated[float, _accuracy("an activation later, at least")] = 2.6,
    bw: Annotated[float, _accuracy("a gradient, at least")] = 1.9,
    tolerance: Annotated[
        float, Parameter("how much longer a step may be, a direction", 0, 0.5, whole=False)
    ] = 0.01,
    gdelta: Annotated[int, _flag("send gradients as deltas by sample too")] = 0,
    dither: Annotated[int, DITHER] = 1,
    memory: Annotated[str, MEMORY] = "sample",
    refs: Annotated[str, Parameter("how references are held", choices=tuple(REFERENCES))] = "int8",
) -> tuple[Pair, PipelinePolicy]:
    """Send as ``thinwire`` this accurately, the floor, or finer where link and compute leave room for it.

    The floor is coarser than the default of ``thinwire``: it is for as long as the link is too slow for more.

    See ``HideBehindCompute`` for the rule. Finer rungs end in bf16 and in values as they are, which pass by
    the references. ``memory="none"`` keeps none, for data seen once. Errors: ``MissingExtra`` without
    zstandard.
    """
    _need_zstandard("auto", 1)

    def finer(by: float) -> PipelineRecipe:
        more = {name: min(8.0, bits + by) for name, bits in (("first", first), ("fw", fw), ("bw", bw))}
        return thinwire(gdelta=gdelta, dither=dither, memory=memory, refs=refs, **more)  # type: ignore[arg-type]

    recipes = list(dict.fromkeys(finer(by) for by in FINER))
    forward, backward = (
        tuple(Rung.of(s.codec, s.keyframe if s.memory.mirrored else None) for s in dict.fromkeys(schemes))
        for schemes in ((r.schemes[way] for r in recipes) for way in (FORWARD, BACKWARD))
    )
    policy = HideBehindCompute((*forward, BF16, EXACT), (*backward, BF16, EXACT), tolerance)
    return dict(recipes[0].schemes), policy
