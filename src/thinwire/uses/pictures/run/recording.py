"""What rank 0 leaves of each way: its record, its lines of repeats, its pictures, and how near they are."""

from __future__ import annotations

import base64
import io
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.replacing import replacing
from thinwire.runs.machine.processor import environment, pick_threads
from thinwire.runs.ranks.launcher import link_of
from thinwire.runs.ranks.world import World
from thinwire.runs.records.finished_runs import slug
from thinwire.runs.records.run_record import PeakMemory, RecipeText
from thinwire.runs.records.writer import RunWriter
from thinwire.similarity import REACH, mse, psnr, ssim
from thinwire.uses.pictures.run.options import PicturesConfig
from thinwire.uses.pictures.run.record import PictureMetrics, PicturesRecord

PICTURE = "picture.png"


@dataclass
class TimedWay:
    """One way, timed so many times: what came of it."""

    name: str
    way: str
    mode: str
    repeats: list[tuple[float, list[float], dict[str, float]]]  # seconds, those of steps, and the tally
    seconds: float
    nbytes: dict[str, int]
    tally: dict[str, float]
    steps: list[float]
    images: list[Tensor]  # [height, width], or of a clip [frames, height, width]
    references: list[Tensor]
    memory: PeakMemory
    predicted: float | None
    predictions: dict[str, Any]


def folder_of(config: PicturesConfig, name: str) -> Path:
    """Return where the record of a name is."""
    return Path(config.out) / slug(name)


def write_records(
    config: PicturesConfig,
    world: World,
    made: list[TimedWay],
    facts: list[dict[str, Any]],
    device: torch.device,
) -> None:
    """Write every record, once all of them are known; ``facts``: of the ranks' devices, this one's first."""
    there = environment(config.dtype, pick_threads(config), device) | {"devices": facts}
    for one in made:
        record = _record(config, world, one, there)
        folder = folder_of(config, one.name)
        writer = RunWriter(folder, record)
        for i, (seconds, steps, tally) in enumerate(one.repeats, 1):
            wait, code = (tally.get(name, 0.0) for name in ("wait_s", "code_s"))
            writer.add(PictureMetrics(repeat=i, seconds=seconds, step_s=steps, wait_s=wait, code_s=code))
        record.totals["seconds"] = one.seconds
        for k, image in enumerate(one.images):
            save_png(image, folder / (PICTURE if k == 0 else f"picture-{k + 1}.png"))
        writer.close("done")


def _record(config: PicturesConfig, world: World, one: TimedWay, there: dict[str, Any]) -> PicturesRecord:
    recipe = config.recipe(one.way)
    label = one.name if one.name == one.way else f"{one.name} ({one.way})"
    pairs = list(zip(one.images, one.references, strict=False))
    wait, code = (one.tally.get(name, 0.0) for name in ("wait_s", "code_s"))
    compute = max(0.0, sum(one.steps) - wait - code)
    record = PicturesRecord(
        recipe=RecipeText(label, recipe.spec),
        config=config.to_dict() | {"recipes": one.name},
        environment=dict(there),
        link=link_of(config),
        bytes=one.nbytes,
        memory=one.memory,
        mode=one.mode,
        ranks=config.ranks,
        step_seconds=statistics.median(one.steps),
        quality=averaged([quality(*pair) for pair in pairs]),
        compute_s=compute,
        wait_s=wait,
        code_s=code,
        comm_to_compute=(wait + code) / compute if compute else None,
        exchanges=int(one.tally.get("exchanges", 0)),
        frames=len(_frames(one.images[0])),
        picture=PICTURE,
        preview=inline_png(one.images[0]),
        difference=inline_png(difference(*pairs[0])),
        predicted_s=one.predicted,
        predictions=one.predictions,
    )
    trips = [peer.reliable.estimate().rtt for peer in world.peers.values()]
    record.link.rtt_s = min((t for t in trips if t is not None), default=None)
    return record


def quality(image: Tensor, reference: Tensor) -> dict[str, float | None]:
    """Return ``psnr_db`` (None for equal pictures), ``ssim``, ``relative_l2`` and ``max_abs``, [H, W] each.

    ``ssim_window`` says in which windows ``ssim`` was measured; before it was said they were uniform, of 7.
    Of clips [F, H, W] ``ssim`` is the mean of the frames, and ``flicker_db`` is the PSNR of what changes from
    frame to frame.

    >>> quality(torch.zeros(16, 16), torch.zeros(16, 16))["psnr_db"] is None
    True
    """
    off = (image - reference).double()
    a, b = image.numpy(), reference.numpy()
    error = mse(a, b)
    norm = float(reference.double().norm())
    changes = off.diff(dim=0).square().mean().item() if off.dim() > 2 else 0.0
    flicker = {"flicker_db": psnr(changes) if changes else None} if off.dim() > 2 else {}
    return flicker | {
        "psnr_db": psnr(error) if error else None,
        "ssim": statistics.fmean(map(ssim, _frames(a), _frames(b))),
        "ssim_window": float(2 * REACH + 1),
        "relative_l2": float(off.norm()) / norm if norm else None,
        "max_abs": float(off.abs().max()),
    }


def averaged(found: list[dict[str, float | None]]) -> dict[str, float | None]:
    """Return the mean of each figure over several pictures, a PSNR of equal ones left out."""
    names = found[0] if found else {}
    known = {name: [f[name] for f in found if f[name] is not None] for name in names}
    return {
        name: float(torch.tensor(values, dtype=torch.float64).mean()) if values else None
        for name, values in known.items()
    }


STRONGER = 10.0  # times, of a difference that is drawn
FRAME_MS = 100  # of a clip that plays


def png(image: Tensor) -> bytes:
    """Return a grey picture [height, width] in 0..1 as PNG; a clip [frames, height, width] plays."""
    from PIL import Image

    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    first, *others = [Image.fromarray(frame, "L") for frame in _frames(pixels.numpy())]
    plays = {"save_all": True, "append_images": others, "duration": FRAME_MS, "loop": 0} if others else {}
    file = io.BytesIO()
    first.save(file, "PNG", optimize=True, **plays)
    return file.getvalue()


def _frames(image: Any) -> Any:
    """Return the frames of a picture or a clip, an array or a tensor."""
    return image.reshape(-1, *image.shape[-2:])


def save_png(image: Tensor, path: Path) -> None:
    """Write a picture as PNG, atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(png(image))


def inline_png(image: Tensor) -> str:
    """Return a picture as PNG in base64, for a page that needs no other file."""
    return base64.b64encode(png(image)).decode("ascii")


def difference(image: Tensor, reference: Tensor) -> Tensor:
    """Return a difference as a picture: grey where there is none, ``STRONGER`` times as strong."""
    return 0.5 + STRONGER * (image - reference) / 2
