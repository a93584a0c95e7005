"""What rank 0 leaves of each way: a folder with its record, its lines of repeats, and its pictures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.runs.machine.processor import environment, pick_threads
from thinwire.runs.ranks.places import link_of
from thinwire.runs.ranks.world import World
from thinwire.runs.records.runs import slug
from thinwire.runs.records.schema import Memory, RecipeText
from thinwire.runs.records.writer import RunWriter
from thinwire.uses.pictures.run import images
from thinwire.uses.pictures.run.options import PicturesConfig
from thinwire.uses.pictures.run.quality import averaged, quality
from thinwire.uses.pictures.run.record import PictureMetrics, PicturesRecord

PICTURE = "picture.png"


@dataclass
class Made:
    """One way, timed so many times: what came of it."""

    name: str
    way: str
    mode: str
    repeats: list[tuple[float, list[float], dict[str, float]]]  # seconds, those of steps, and the tally
    seconds: float
    nbytes: dict[str, int]
    tally: dict[str, float]
    steps: list[float]
    images: list[Tensor]
    references: list[Tensor]
    predicted: float | None
    predictions: dict[str, Any]


def folder_of(config: PicturesConfig, name: str) -> Path:
    """Return where the record of a name is."""
    return Path(config.out) / slug(name)


def write_records(config: PicturesConfig, world: World, made: list[Made], rss: list[int]) -> None:
    """Write every record, once all of them are known."""
    for one in made:
        record = _record(config, world, one, rss)
        folder = folder_of(config, one.name)
        writer = RunWriter(folder, record)
        for i, (seconds, steps, tally) in enumerate(one.repeats, 1):
            wait, code = (tally.get(name, 0.0) for name in ("wait_s", "code_s"))
            writer.add(PictureMetrics(repeat=i, seconds=seconds, step_s=steps, wait_s=wait, code_s=code))
        record.totals["seconds"] = one.seconds
        for k, image in enumerate(one.images):
            images.save(image, folder / (PICTURE if k == 0 else f"picture-{k + 1}.png"))
        writer.close("done")


def _record(config: PicturesConfig, world: World, one: Made, rss: list[int]) -> PicturesRecord:
    recipe = config.recipe(one.way)
    label = one.name if one.name == one.way else f"{one.name} ({one.way})"
    pairs = list(zip(one.images, one.references, strict=False))
    wait, code = (one.tally.get(name, 0.0) for name in ("wait_s", "code_s"))
    compute = max(0.0, sum(one.steps) - wait - code)
    record = PicturesRecord(
        recipe=RecipeText(label, recipe.spec),
        config=config.to_dict() | {"recipes": one.name},
        environment=environment("fp32", pick_threads(config)),
        link=link_of(config),
        bytes=one.nbytes,
        memory=Memory(rss),
        mode=one.mode,
        ranks=config.ranks,
        step_seconds=statistics.median(one.steps),
        quality=averaged([quality(*pair) for pair in pairs]),
        compute_s=compute,
        wait_s=wait,
        code_s=code,
        comm_to_compute=(wait + code) / compute if compute else None,
        exchanges=int(one.tally.get("exchanges", 0)),
        picture=PICTURE,
        preview=images.inline(one.images[0]),
        difference=images.inline(images.difference(*pairs[0])),
        predicted_s=one.predicted,
        predictions=one.predictions,
    )
    trips = [peer.reliable.estimate().rtt for peer in world.peers.values()]
    record.link.rtt_s = min((t for t in trips if t is not None), default=None)
    return record
