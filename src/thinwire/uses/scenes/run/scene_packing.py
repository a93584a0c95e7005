"""Pack a scene to a target, and measure what is left of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.links.shape import LinkShape
from thinwire.runs.machine.processor import environment
from thinwire.runs.records.run_record import LinkInfo, RecipeText
from thinwire.types import InputError, MissingExtra, require
from thinwire.uses.scenes import importance_coder, search
from thinwire.uses.scenes.coded import Coded
from thinwire.uses.scenes.files.clipping import told_beyond
from thinwire.uses.scenes.files.foreign import read_foreign, write_foreign
from thinwire.uses.scenes.files.packed_scene import read_scene, write_scene
from thinwire.uses.scenes.files.scene_file import read_scene_file
from thinwire.uses.scenes.importance import seen_through
from thinwire.uses.scenes.layers import LAYERS, encode_layers, shown_after, stand_ins
from thinwire.uses.scenes.mesongs import MesonGS
from thinwire.uses.scenes.part import Layer, Part
from thinwire.uses.scenes.recipes import SCENE, SCENES, Coder
from thinwire.uses.scenes.refining import refined_scene
from thinwire.uses.scenes.refining.refinement import RATES, refined
from thinwire.uses.scenes.refining.teacher import Teacher, others
from thinwire.uses.scenes.run.record import LayerInfo, Rival, SceneRecord, ViewQuality
from thinwire.uses.scenes.scene import Splats, cleaned
from thinwire.uses.scenes.thinning import fewest, thinned_to_budget, thinned_to_quality
from thinwire.uses.scenes.view.given import read_cameras
from thinwire.uses.scenes.view.render import Pictures, Seen, there
from thinwire.uses.scenes.view.views import Views

TRIES = 2  # at a quality that the reported cameras do not see yet
CHECKED = 8  # cameras that say whether a refined scene has the quality asked for
IN_PLACE = {name: rate for name, rate in RATES.items() if name != "positions"}
Told = Callable[[str], None]


def silent(doing: str) -> None:
    """Tell nobody what is being done."""


@dataclass(frozen=True)
class Packing:
    """What to pack and how: a recipe, and a target in bytes or dB, or none where the recipe says all."""

    source: Path
    recipe: str = "thinwire"
    nbytes: int | None = None
    quality: float | None = None  # dB
    strict: bool = False
    cameras: Path | None = None  # else thinwire chooses some
    refine: bool = False

    def __post_init__(self) -> None:
        targets, own = (self.nbytes, self.quality), self.coder
        check_refined(own, self.recipe, self.refine)
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


def check_refined(coder: Coder, recipe: str, refine: bool) -> None:
    """Raise ``InputError`` where a scene cannot be refined, or not by ``--refine``."""
    if isinstance(coder, MesonGS):
        told = f"{recipe} is refined by its own parameter: leave --refine out, and take mesongs:refine=300"
        require(not refine, InputError, told)
    elif refine:
        told = f"{recipe} codes coefficients, whose rounding --refine does not know; take transform=raw"
        require(not coder.transforms, InputError, told)
    needed = refine or (isinstance(coder, MesonGS) and coder.refine > 0)
    told = "refining takes days without the compiled passes; install thinwire where a C compiler is"
    require(not needed or there(), InputError, told)


def pack(job: Packing, told: Told = silent) -> tuple[bytes, SceneRecord]:
    """Return a scene's packed file and the record of it; ``told`` hears what is being done.

    Errors: ``InputError``, ``MissingExtra``.
    """
    told("reading the scene")
    start = time.monotonic()
    found, source_nbytes = read_scene_file(job.source)
    splats, odd = cleaned(found, job.strict)
    told(f"packing {splats.count:,} splats")
    began = time.process_time()
    views = views_of(splats, job.cameras)
    layers, seen = _coded(job, splats, views, told)
    data = write_scene(layers)
    encode_s = time.process_time() - began
    record = SceneRecord(recipe=RecipeText(job.recipe, repr(job.coder)), source=str(job.source))
    record.source_nbytes, record.packed_nbytes, record.encode_cpu_s = source_nbytes, len(data), encode_s
    record.target_nbytes, record.target_db = job.nbytes, job.quality
    record.splats, record.bands, record.odd = splats.count, splats.bands, odd._asdict()
    record.environment, record.cameras = environment("fp32", 1), str(job.cameras or "")
    record.refined = job.refine or getattr(job.coder, "refine", 0) > 0
    record.unseen = int((seen.weights == 0).sum())
    told("measuring what is left")
    _measure(record, splats, read_scene(data), views)
    record.status, record.totals["seconds"] = "done", time.monotonic() - start
    return data, record


def views_of(splats: Splats, cameras: Path | None) -> Views:
    """Return the cameras that a scene is judged by: those of a file, if any. Errors: ``InputError``."""
    return Views.of(splats) if cameras is None else Views.given(splats, read_cameras(cameras))


def _coded(job: Packing, splats: Splats, views: Views, told: Told) -> tuple[list[Layer], Seen]:
    """Return a scene's layers, and how much of each splat the chosen cameras see."""
    coder = job.coder
    if isinstance(coder, MesonGS):
        seen = _some(seen_through(splats, views), job)
        return [Layer(tuned(coder, splats, views, seen, told))], seen
    scene = importance_coder.Analysis.through(views, splats)
    seen = _some(scene.seen, job)
    if job.refine:
        return refined_layers(scene, splats, job.nbytes, job.quality, coder.layers, told), seen
    scene = replace(scene, transforms=coder.transforms)
    return layers_to(scene, splats, job.nbytes, job.quality, coder.layers), seen


def tuned(coder: MesonGS, splats: Splats, views: Views, seen: Seen, told: Told = silent) -> Part:
    """Return a scene by MesonGS, with its fine-tuning where the coder has steps of it."""
    if not coder.refine:
        return coder.encode(splats, seen)
    teacher = Teacher.of(splats, views)

    def tuning(rows: Splats, back: Callable[[Splats], Splats]) -> Splats:
        return refined(rows, teacher, coder.refine, rounded=back, told=told, rates=IN_PLACE)

    return coder.encode(splats, seen, tuning)


def _some(seen: Seen, job: Packing) -> Seen:
    told = f"no camera of {job.cameras} sees any splat; give cameras of this scene, in its coordinates"
    require(job.cameras is None or bool(seen.weights.any()), InputError, told)
    return seen


def layers_to(
    scene: importance_coder.Analysis, splats: Splats, nbytes: int | None, quality: float | None, layers: int
) -> list[Layer]:
    """Return a scene's layers in ``nbytes``, or without such a target at ``quality`` dB."""
    if nbytes is not None:
        return layers_within(scene, nbytes, layers)
    return _layers_reported(scene, splats, float(quality or 0), layers)


def refined_layers(
    scene: importance_coder.Analysis,
    splats: Splats,
    nbytes: int | None,
    quality: float | None,
    layers: int,
    told: Told = silent,
) -> list[Layer]:
    """Return what ``layers_to`` does, of fewer splats that are refined: in minutes, for fewer bytes.

    Errors: ``InputError``.
    """
    told("drawing what splats are refined by")
    teacher = Teacher.of(splats, scene.views)
    if nbytes is not None:
        return _refined_within(scene, teacher, nbytes, layers, told)
    least, views = float(quality or 0), scene.views
    fresh = others(views, 1)[len(views.chosen) :]  # none of which splats were refined by
    pictures = Pictures(splats, fresh[:CHECKED] or views.searched)
    found = refined_at(scene, teacher, pictures, least, layers, told)
    reported = Pictures(splats, views.reported)
    missing = least - reported.psnr(reported.of(shown_after(found)))
    return found if missing <= 0 else refined_at(scene, teacher, pictures, least + missing, layers, told)


def _refined_within(
    scene: importance_coder.Analysis, teacher: Teacher, nbytes: int, layers: int, told: Told
) -> list[Layer]:
    plain = thinned_to_budget(scene, nbytes)[0].splats.count
    fewer = refined_scene.thinned_to(scene.splats, teacher, max(int(refined_scene.SHARE * plain), 1), told)
    own = importance_coder.Analysis.through(scene.views, fewer)
    shown = stand_ins(own, nbytes, layers)

    def size(scene: importance_coder.Analysis, slope: float) -> int:
        return _nbytes(encode_layers(scene, slope, shown, layers))

    found, slope = refined_scene.to_budget(own, teacher, size, nbytes, told)
    return encode_layers(found, slope, shown, layers)


def refined_at(
    scene: importance_coder.Analysis,
    teacher: Teacher,
    pictures: Pictures,
    least: float,
    layers: int,
    told: Told = silent,
) -> list[Layer]:
    """Return layers of fewer splats, refined by a teacher, whose ``pictures`` have ``least`` dB.

    Errors: ``InputError``.
    """

    def few(fewer: Splats) -> bool:
        return pictures.psnr(pictures.of(fewer)) < least - refined_scene.SHORT

    fewer = refined_scene.thinned(scene.splats, teacher, few, told)
    own = importance_coder.Analysis.through(scene.views, fewer)
    own, slope = refined_scene.to_quality(own, teacher, pictures, least, told)
    shown = stand_ins(own, importance_coder.encode(own, slope).nbytes, layers)
    return encode_layers(own, slope, shown, layers)


def _layers_reported(
    scene: importance_coder.Analysis, splats: Splats, least: float, layers: int
) -> list[Layer]:
    """Return a scene's layers that have ``least`` dB at the reported cameras too, as far as tries go.

    Searches look through others, so that what is reported is not what was chosen by. More is asked of these
    where the reported ones see less.
    """
    pictures, reported = Pictures(splats, scene.views.searched), Pictures(splats, scene.views.reported)
    found, asked = layers_at(scene, pictures, least, layers), least
    for _ in range(TRIES):
        missing = least - reported.psnr(reported.of(shown_after(found)))
        if missing <= 0:
            break
        asked += missing + search.NEAR
        with suppress(InputError):  # no steps are that fine; then what is missing is said
            found = layers_at(scene, pictures, asked, layers)
    return found


def layers_within(scene: importance_coder.Analysis, nbytes: int, layers: int = LAYERS) -> list[Layer]:
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
    return search.to_budget(
        lambda slope: [Layer(importance_coder.encode(last, slope))], _nbytes, nbytes, start
    )


def layers_at(
    scene: importance_coder.Analysis, pictures: Pictures, least: float, layers: int = LAYERS
) -> list[Layer]:
    """Return a scene's layers, so many, whose ``pictures`` have ``least`` dB, or a little more.

    Errors: ``InputError``.
    """
    fewer, start = thinned_to_quality(scene, pictures, least)

    def made(slope: float) -> tuple[float, Coded]:
        return slope, importance_coder.quantised(fewer, slope)

    def quality(found: tuple[float, Coded]) -> float:
        return pictures.psnr(pictures.of(found[1].splats()))

    slope, whole = search.to_quality(made, quality, least, start)
    shown = stand_ins(fewer, _nbytes([Layer(whole.part())]), layers)
    return encode_layers(fewer, slope, shown, layers)


def _nbytes(layers: list[Layer]) -> int:
    return len(write_scene(layers))


def _measure(record: SceneRecord, splats: Splats, layers: list[Layer], views: Views) -> None:
    """Note how near the packed scene and its rivals come at cameras that nothing was chosen by."""
    pictures, kinds = Pictures(splats, views.reported), [camera.kind for camera in views.chosen]
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
    seen = pictures.by_kind(drawn)
    record.ssim = min(alike for _, _, alike in seen.values())
    if record.psnr_db is not None and record.psnr_db < (record.target_db or -math.inf):
        asked = f"{record.target_db:g} dB are asked for"
        record.notes.append(f"{asked}, and the reported cameras see {record.psnr_db:.2f}; ask for more")
    record.views = [
        ViewQuality(kind, kinds.count(kind), reported, _known(decibels), alike)
        for kind, (reported, decibels, alike) in seen.items()
    ]
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
