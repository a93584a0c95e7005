"""How long a way to make a picture will take, from one measured step, the link, and what crosses it."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs import Codec
from thinwire.types import WRONG_VALUES, TensorSpec
from thinwire.uses.pictures.coding import Coding
from thinwire.uses.pictures.context_parallel.patches import suited
from thinwire.uses.pictures.context_parallel.recipes import (
    ATTENTION,
    DIFFUSION,
    OUTPUT,
    division_of,
    parse_diffusion_recipe,
)
from thinwire.uses.pictures.run.options import AUTO, BATCH, GUIDANCE, ONE, PicturesConfig
from thinwire.uses.pictures.run.sheets import Sheet

HALF = 16  # bits of float16
TOKENS, WIDTH = 1024, 192  # of a tensor by which the bits of a code are told
# dB against one device on a sheet of 4x8 in 28 steps, the worst of three noises, rounded down; None: equal.
EXPECTED: dict[str, float | None] = {
    ONE: None,
    "fp16": 94.0,
    "ulysses": 77.0,
    "compact:bits=2": 72.0,
    "int8": 68.0,
    "compact": 57.0,
    "pipe-fp16": 53.0,
    "compact-pipe": 52.0,
    "lowrank": 43.0,
}


@dataclass(frozen=True)
class StepTraffic:
    """What a later step of a mode sends as float16: bytes of the rank that sends most, and messages."""

    nbytes: float
    output_nbytes: float
    exchanges: float


@dataclass(frozen=True)
class ForwardAndLink:
    """One forward of the whole picture [s], and the slowest link: bytes/s and seconds one way."""

    forward: float
    rate: float
    delay: float


def step_seconds(
    name: str, config: PicturesConfig, machine: ForwardAndLink, crossings: dict[str, StepTraffic]
) -> float:
    """Return the seconds of a denoising step, for each picture."""
    division, schemes, ranks = division_of(name), parse_diffusion_recipe(name).schemes, config.ranks
    mode = division.mode
    forwards = 1 if config.guidance == 1 else 2
    if mode == ONE or ranks == 1:
        return forwards * machine.forward
    if mode == BATCH:
        rounds = -(-config.pictures // ranks)
        return forwards * machine.forward * rounds / config.pictures
    crossing = crossings[mode]
    if mode == GUIDANCE:
        return machine.forward + crossing.nbytes / machine.rate + crossing.exchanges * machine.delay
    attention, output = (bits(schemes[role]) / HALF for role in (ATTENTION, OUTPUT))
    nbytes = (crossing.nbytes - crossing.output_nbytes) * attention + crossing.output_nbytes * output
    compute, wire = forwards * machine.forward / ranks, nbytes / machine.rate
    if mode == "pipe":  # the last rank waits for the first patch to come through, and all for the last one
        scene = config.scene
        words = scene.garments if isinstance(scene, Sheet) else 0
        patches = division.patches or suited(scene.tokens, words, ranks)
        compute *= (scene.tokens + patches * words) / (scene.tokens + words)  # words go along with each patch
        return compute * (patches + ranks - 1) / patches + wire + 2 * machine.delay
    if mode == "displaced":  # messages travel beside compute
        return max(compute, wire) + machine.delay
    return compute + wire + crossing.exchanges * machine.delay


def bits(coding: Coding) -> float:
    """Return the bits of a value after the warm-up."""
    codec: Codec = coding.scheme.codec
    try:
        return 8 * codec.nbytes(TensorSpec((TOKENS, WIDTH))) / (TOKENS * WIDTH)
    except WRONG_VALUES:
        return HALF


def verdict(seconds: dict[str, float]) -> str | None:
    """Return the sentence for a link over which one machine is faster; None where another way is.

    >>> verdict({"one": 10.0, "fp16": 14.0})
    'one machine is faster over this link: 10 s are predicted, and 14 s with fp16, the next best'
    """
    others = {name: s for name, s in seconds.items() if name not in (ONE, BATCH)}
    if ONE not in seconds or not others:
        return None
    best = min(others, key=others.__getitem__)
    if others[best] <= seconds[ONE]:
        return None
    return (
        f"one machine is faster over this link: {seconds[ONE]:.2g} s are predicted, and {others[best]:.2g} s "
        f"with {best}, the next best"
    )


def candidates(config: PicturesConfig) -> list[str]:
    """Return what ``auto`` chooses from: what keeps to --psnr, and what is exact."""
    kept = [name for name, db in EXPECTED.items() if db is None or db >= config.psnr]
    two = config.guidance != 1 and config.ranks == 2 and GUIDANCE in DIFFUSION.entries
    exact = [GUIDANCE] if two else []
    return [*kept, *exact, *([BATCH] if config.pictures > 1 else [])]


def resolved(names: list[str], chosen_from: list[str], seconds: dict[str, float]) -> dict[str, str]:
    """Return for each name asked for the recipe that is run: itself, or what ``auto`` takes."""
    return {
        name: min(chosen_from, key=seconds.__getitem__, default=ONE) if name == AUTO else name
        for name in names
    }
