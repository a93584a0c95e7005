"""Recipes: what crosses a stage boundary each way, one short function per published system, and ours.

Written ``name:parameter=value,...`` on the command line, as in ``aqsgd:fw=4,bw=8``; from Python
``aqsgd(fw=4)``. In docstrings [quoted] is what the named paper says, [source] what was read in its code,
[second-hand] somebody else's notes on a paper, [derived] our reading or arithmetic.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Annotated, Any, ParamSpec, get_type_hints

from thinwire.channel import Scheme, parse_scheme
from thinwire.codecs import (
    Cast,
    ChannelMean,
    Codec,
    Entropy,
    FixedPoint,
    Raw,
    Sink,
    TileAdaptive,
    Uniform,
)
from thinwire.memory import Delta, FirstVisit, NoMemory
from thinwire.types import InputError, MissingExtra, PayloadError, require

P = ParamSpec("P")
Value = int | float | str | None
Pair = tuple[Scheme, Scheme]


@dataclass(frozen=True)
class Recipe:
    """A scheme for activations, one for gradients, and the name they go by."""

    name: str
    forward: Scheme
    backward: Scheme
    summary: str = field(default="", compare=False)

    @property
    def spec(self) -> str:
        """Both schemes, printed so that ``parse_recipe`` reads them back."""
        return f"forward={self.forward!r}, backward={self.backward!r}"


@dataclass(frozen=True)
class Parameter:
    """A knob of a recipe: what it does, which values it takes, and its default."""

    meaning: str
    low: float = 0
    high: float = 1
    choices: tuple[str, ...] = ()
    whole: bool = True
    default: Value = None

    @property
    def values(self) -> str:
        """The values it takes, in words."""
        if self.choices:
            return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
        return f"{'a whole number' if self.whole else 'a number'} in {self.low:g}..{self.high:g}"

    def read(self, text: str) -> Value:
        """Return the value that ``text`` stands for; text that stands for none comes back as it is."""
        if self.choices:
            return text
        try:
            return int(text) if self.whole else float(text)
        except ValueError:
            return text

    def accepts(self, value: Value) -> bool:
        if self.choices or isinstance(value, str):
            return value in self.choices
        if value is None:
            return self.default is None
        return self.low <= value <= self.high and (not self.whole or value == int(value))


@dataclass(frozen=True)
class RecipeInfo:
    """What is known of a recipe before it is built."""

    name: str
    summary: str
    source: str
    parameters: dict[str, Parameter]
    build: Callable[..., Recipe] = field(repr=False)


RECIPES: dict[str, RecipeInfo] = {}


def _recipe(name: str, summary: str, source: str) -> Callable[[Callable[P, Pair]], Callable[P, Recipe]]:
    """Register a function that returns the two schemes, with its parameters checked, as a recipe."""

    def register(schemes: Callable[P, Pair]) -> Callable[P, Recipe]:
        signature, parameters = inspect.signature(schemes), _parameters(schemes)

        @wraps(schemes)
        def build(*args: P.args, **kwargs: P.kwargs) -> Recipe:
            given = signature.bind(*args, **kwargs).arguments
            _check(name, parameters, given)
            shown = [f"{k}={v}" for k, v in given.items() if v != parameters[k].default]
            return Recipe(f"{name}:{','.join(shown)}" if shown else name, *schemes(*args, **kwargs), summary)

        RECIPES[name] = RecipeInfo(name, summary, source, parameters, build)
        return build

    return register


def _parameters(schemes: Callable[..., Pair]) -> dict[str, Parameter]:
    hints = get_type_hints(schemes, include_extras=True)
    return {
        k: replace(hints[k].__metadata__[0], default=p.default)
        for k, p in inspect.signature(schemes).parameters.items()
    }


def _check(name: str, parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> None:
    for k, value in given.items():
        if not parameters[k].accepts(value):
            raise InputError(
                f"{name}: {k}={value} is not {parameters[k].values}; {k} is {parameters[k].meaning}"
            )


def parse_recipe(text: str) -> Recipe:
    """Return the recipe that ``name``, ``name:parameter=value,...`` or a printed ``Recipe.spec`` stands for.

    Errors: ``InputError``, one sentence that names the unknown or wrong word and what would be right;
    ``MissingExtra`` where the recipe needs a package that is not installed.

    >>> parse_recipe("direct:bits=4").spec
    'forward=Scheme(Uniform()), backward=Scheme(Uniform())'
    """
    if text.startswith("forward="):
        return _parse_spec(text)
    name, _, rest = text.strip().partition(":")
    info = RECIPES.get(name)
    if info is None:
        near = difflib.get_close_matches(name, RECIPES, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(RECIPES)}"
        raise InputError(f"there is no recipe {name!r}; {hint}")
    return info.build(**_read(info, rest))


def _read(info: RecipeInfo, text: str) -> dict[str, Value]:
    given: dict[str, Value] = {}
    for word in filter(None, (w.strip() for w in text.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        require(
            bool(equals),
            InputError,
            f"{info.name}: {word!r} is no parameter=value; write {info.name}:k=v,...",
        )
        if key not in info.parameters:
            known = f"it takes {', '.join(info.parameters)}" if info.parameters else "it takes none"
            raise InputError(f"recipe {info.name} has no parameter {key!r}; {known}")
        require(key not in given, InputError, f"{info.name}: {key} is given twice; leave one out")
        given[key] = info.parameters[key].read(value)
    return given


def _parse_spec(text: str) -> Recipe:
    forward, found, backward = text.removeprefix("forward=").partition(", backward=")
    try:
        return Recipe("custom", parse_scheme(forward), parse_scheme(backward if found else ""))
    except (PayloadError, InputError) as e:
        raise InputError(f"not a recipe's spec, forward=Scheme(...), backward=Scheme(...): {e}") from e


def _bits(of: str, low: int = 1) -> Parameter:
    return Parameter(f"the bits of {of}", low, 8)


def _flag(meaning: str) -> Parameter:
    return Parameter(f"1 to {meaning}, 0 not to")


ROUNDING = Parameter("how codes are rounded", choices=("nearest", "stochastic"))
GROUP = Parameter("how many neighbouring values share a scale", 1, 4096)
SCALE = Parameter("what shares a scale", choices=("tensor", "channel", "token", "group"))


@_recipe("fp32", "Everything as it is: the baseline.", "none")
def fp32() -> Pair:
    """Send tensors uncompressed, 32 bits a value for float32."""
    return Scheme(), Scheme()


@_recipe("bf16", "Everything cast to bfloat16.", "common practice")
def bf16() -> Pair:
    """Send the upper half of each float32: 16 bits a value, 8 of them significant."""
    return Scheme(Cast("bfloat16")), Scheme(Cast("bfloat16"))


@_recipe(
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
    return Scheme(forward), Scheme(backward)


@_recipe(
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
    return scheme, scheme


@_recipe(
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
    return Scheme(forward, Delta()), Scheme(backward)


@_recipe(
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
    return forward, Scheme(FixedPoint(bw, "bfloat16"), FirstVisit())


@_recipe(
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
    return Scheme(TileAdaptive(tile, high, low, share, threshold)), Scheme(Uniform(bw, scale))


REFERENCES: dict[str, Codec] = {"int8": Uniform(8), "float16": Cast("float16"), "float32": Raw()}
CLIP = Parameter("the share of a group's peak that the top level stands for", 0.05, 1, whole=False)


@_recipe(
    "thinwire",
    "Ours: coded first visits, deltas by sample, cheap gradients, all entropy-coded.",
    "docs/recipes.md; builds on arXiv 2206.01299",
)
def thinwire(
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
    if entropy and importlib.util.find_spec("zstandard") is None:
        raise MissingExtra(
            "recipe thinwire needs zstandard: pip install 'thinwire[entropy]', or take thinwire:entropy=0"
        )

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
    return Scheme(coded(fw, clip=fclip), Delta(), keyframe, held), backward
