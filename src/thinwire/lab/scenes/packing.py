"""Pack a scene to a target, and measure what is left of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.assets.splats import search, thinwire
from thinwire.assets.splats.coded import Coded
from thinwire.assets.splats.files.clipping import told_beyond
from thinwire.assets.splats.files.container import read_scene, write_scene
from thinwire.assets.splats.files.foreign import read_foreign, write_foreign
from thinwire.assets.splats.files.scene_file import read_scene_file
from thinwire.assets.splats.importance import seen_around
from thinwire.assets.splats.layers import LAYERS, encode_layers, shown_after, stand_ins
from thinwire.assets.splats.mesongs import MesonGS
from thinwire.assets.splats.part import Layer
from thinwire.assets.splats.scene import Splats, cleaned
from thinwire.assets.splats.thinning import fewest, searched, thinned_to_budget, thinned_to_quality
from thinwire.assets.splats.view.cameras import Frame, reported_views
from thinwire.assets.splats.view.pictures import Pictures
from thinwire.lab.machine.processor import environment
from thinwire.lab.records.schema import LinkInfo, RecipeText
from thinwire.lab.scenes.record import LayerInfo, Rival, SceneRecord
from thinwire.links.shape import LinkShape
from thinwire.recipes.scenes import SCENE, SCENES, Coder
from thinwire.types import InputError, MissingExtra, require


@dataclass(frozen=True)
class Packing:
    """What to pack and how: a recipe, and a target in bytes or dB, or none where the recipe says all."""

    source: Path
    recipe: str = "thinwire"
    nbytes: int | None = None
    quality: float | None = None  # dB
    strict: bool = False

    def __post_init__(self) -> None:
        targets, own = (self.nbytes, self.quality), self.coder
        if isinstance(own, MesonGS):
            told = f"{self.recipe} takes no target: its parameters say how small; leave the target out"
            require(targets == (None, None), InputError, told)
        else:
            told = "give one target: --target 5MB, --seconds 4 --link 10mbit,30ms or --quality 40dB"
            require(sum(t is not None for t in targets) == 1, InputError, told)

    @property
    def coder(self) -> Coder:
        """How the recipe codes."""
        return SCENES.parse(self.recipe).schemes[SCENE]


def pack(job: Packing, told: Callable[[str], None] = lambda doing: None) -> tuple[bytes, SceneRecord]:
    """Return a scene's packed file and the record of it; ``told`` hears what is being done.

    Errors: ``InputError``, ``MissingExtra``.
    """
    told("reading the scene")
    start = time.monotonic()
    found, source_nbytes = read_scene_file(job.source)
    splats, odd = cleaned(found, job.strict)
    told(f"packing {splats.count:,} splats")
    began = time.process_time()
    data = write_scene(_coded(job, splats))
    encode_s = time.process_time() - began
    record = SceneRecord(recipe=RecipeText(job.recipe, repr(job.coder)), source=str(job.source))
    record.source_nbytes, record.packed_nbytes, record.encode_cpu_s = source_nbytes, len(data), encode_s
    record.target_nbytes, record.target_db = job.nbytes, job.quality
    record.splats, record.bands, record.odd = splats.count, splats.bands, odd._asdict()
    record.environment = environment("fp32", 1)
    told("measuring what is left")
    _measure(record, splats, read_scene(data))
    record.status, record.totals["seconds"] = "done", time.monotonic() - start
    return data, record


def _coded(job: Packing, splats: Splats) -> list[Layer]:
    coder = job.coder
    if isinstance(coder, MesonGS):
        return [Layer(coder.encode(splats, seen_around(splats, Frame.of(splats))))]
    scene = replace(thinwire.Analysis.of(splats), transforms=coder.transforms)
    if job.nbytes is not None:
        return layers_within(scene, job.nbytes, coder.layers)
    pictures = searched(splats, scene.frame)
    return layers_at(scene, pictures, float(job.quality or 0), coder.layers)


def layers_within(scene: thinwire.Analysis, nbytes: int, layers: int = LAYERS) -> list[Layer]:
    """Return a scene's layers, so many, in ``nbytes`` with the header, or 2 % less at most.

    Errors: ``InputError``.
    """
    fewer, start = thinned_to_budget(scene, nbytes)
    shown = stand_ins(fewer, nbytes, layers)
    with suppress(InputError):
        return search.to_budget(
            lambda slope: encode_layers(fewer, slope, shown, layers), _nbytes, nbytes, start
        )
    last = fewest(scene)
    return search.to_budget(lambda slope: [Layer(thinwire.encode(last, slope))], _nbytes, nbytes, start)


def layers_at(
    scene: thinwire.Analysis, pictures: Pictures, least: float, layers: int = LAYERS
) -> list[Layer]:
    """Return a scene's layers, so many, whose ``pictures`` have ``least`` dB, or a little more.

    Errors: ``InputError``.
    """
    fewer, start = thinned_to_quality(scene, pictures, least)

    def made(slope: float) -> tuple[float, Coded]:
        return slope, thinwire.quantised(fewer, slope)

    def quality(found: tuple[float, Coded]) -> float:
        return pictures.psnr(pictures.of(found[1].splats()))

    slope, whole = search.to_quality(made, quality, least, start)
    shown = stand_ins(fewer, _nbytes([Layer(whole.part())]), layers)
    return encode_layers(fewer, slope, shown, layers)


def _nbytes(layers: list[Layer]) -> int:
    return len(write_scene(layers))


def _measure(record: SceneRecord, splats: Splats, layers: list[Layer]) -> None:
    """Note how near the packed scene and its rivals come at cameras that nothing was chosen by."""
    pictures = Pictures(splats, reported_views(Frame.of(splats)))
    for i, layer in enumerate(layers):
        began = time.process_time()
        shown = shown_after(layers[: i + 1])
        record.decode_cpu_s = time.process_time() - began
        drawn = pictures.of(shown)
        record.psnr_db = _known(pictures.psnr(drawn))
        record.layers.append(LayerInfo(layer.nbytes, shown.count, psnr_db=record.psnr_db))
        for part in layer.parts.values():
            for name, stream in part.streams.items():
                record.streams[name] = record.streams.get(name, 0) + len(stream)
    record.ssim = pictures.ssim(drawn)
    try:
        spz = write_foreign(splats, "spz")
        record.notes += told_beyond(splats, "spz")
        record.rivals = [Rival("spz", len(spz), _known(pictures.psnr(pictures.of(read_foreign(spz, "spz")))))]
    except MissingExtra as e:
        record.notes.append(str(e))


def _known(decibels: float) -> float | None:
    return decibels if math.isfinite(decibels) else None


def predicted(record: SceneRecord, shape: LinkShape) -> SceneRecord:
    """Return a record with the seconds until each layer, and each rival, is there over a link with a rate."""
    rate, delay = shape.rate or math.inf, shape.delay
    sent, layers = record.packed_nbytes - sum(x.nbytes for x in record.layers), list[LayerInfo]()
    for layer in record.layers:
        sent += layer.nbytes
        layers.append(replace(layer, seconds_predicted=sent / rate + delay))
    rivals = [replace(x, seconds_predicted=x.nbytes / rate + delay) for x in record.rivals]
    link = LinkInfo(str(shape), shape.rate, delay or None)
    return replace(record, layers=layers, rivals=rivals, link=link)
