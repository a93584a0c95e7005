"""The record of one packed scene."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from thinwire.runs.records.run_record import RunRecord, about


@dataclass
class LayerInfo:
    """A layer of a packed scene: what it takes, and what a receiver sees once it is there."""

    nbytes: int = about("bytes of its streams")
    splats: int = about("splats that are seen with it")
    seconds_predicted: float | None = about("seconds until it is there, over the link asked for", None)
    seconds_measured: float | None = about("the same as measured; `null` where nothing was sent", None)
    psnr_db: float | None = about("PSNR to the source at the cameras of the report; `null` where equal", None)


@dataclass
class Rival:
    """Another format of the same scene."""

    name: str = about("the format: `spz`")
    nbytes: int = about("bytes of its file")
    psnr_db: float | None = about("PSNR to the source at the same cameras; `null` where equal", None)
    seconds_predicted: float | None = about("seconds until its last byte is there, as of a layer", None)
    seconds_measured: float | None = about("the same as measured; `null` where it was not sent", None)


@dataclass
class Picture:
    """One of the pictures beside the record: by the same camera, with its credit in it."""

    name: str = about("`source`, `layer 1`, ... or a rival's name")
    file: str = about("its file")
    difference: str = about("file of its difference from the source's; empty for the source", "")


@dataclass
class ViewQuality:
    """What cameras of one kind see of a packed scene."""

    name: str = about("where they stand: `around the scene`, `within the scene`, or `as given`")
    chosen: int = about("cameras that say what matters")
    reported: int = about("other cameras, between those, that the figures are of")
    psnr_db: float | None = about("PSNR to the source's own pictures there; `null` where equal", None)
    ssim: float | None = about("structural similarity to the same pictures", None)


@dataclass
class SceneRecord(RunRecord):
    """The record of a scene that was packed."""

    KEYS: ClassVar[dict[str, str]] = {
        "totals.seconds": "wall-clock seconds of packing, and of what was measured then",
    }
    # What a scene is packed to is what runs are compared for.
    FREE: ClassVar[frozenset[str]] = RunRecord.FREE | {
        "scene",
        "target",
        "seconds",
        "quality",
        "strict",
        "cameras",
        "refine",
        "link",
    }

    kind: str = about("`scene`", "scene")
    unit: str = about("`scene`", "scene")
    source: str = about("the file or folder that was packed", "")
    credit: str = about("whose scene it is, and under which licence; empty where nothing says so", "")
    source_nbytes: int = about("its bytes", 0)
    target_nbytes: int | None = about("bytes asked for, if any", None)
    target_db: float | None = about("PSNR asked for in dB, if any", None)
    packed_nbytes: int = about("bytes of the packed file, header included", 0)
    splats: int = about("splats that were packed", 0)
    bands: int = about("bands of spherical harmonics besides the constant one", 0)
    cameras: str = about("file or folder of cameras that were given; empty where thinwire chose them", "")
    refined: bool = about("whether splats were refined on pictures of the scene", False)
    views: list[ViewQuality] = about("one object a kind of cameras", make=list)
    unseen: int = about("splats that none of the chosen cameras sees: no figure is about them", 0)
    odd: dict[str, int] = about("splats that were `dropped`, and odd ones that were kept, by kind", make=dict)
    streams: dict[str, int] = about("bytes of each stream, all layers together", make=dict)
    layers: list[LayerInfo] = about("one object a layer, the coarsest first", make=list)
    rivals: list[Rival] = about("other formats of the same scene, at whatever quality they have", make=list)
    pictures: list[Picture] = about("pictures beside the record, the source's first", make=list)
    stronger: float = about("times by which the pictures of differences are amplified", 0.0)
    psnr_db: float | None = about(
        "PSNR to the source's own pictures at the reported cameras, of the worst kind; `null` where equal",
        None,
    )
    ssim: float | None = about("structural similarity to the same pictures, of the worst kind", None)
    encode_cpu_s: float = about("processor seconds of packing, pictures for importance included", 0.0)
    decode_cpu_s: float = about("processor seconds of unpacking", 0.0)

    def conditions(self) -> dict[str, str]:
        """Return what must be the same in runs whose figures compare: the scene, and a link if any."""
        told = super().conditions() | {"scene": f"{Path(self.source).name} of {self.splats} splats"}
        told |= {"views": ", ".join(f"{view.reported} cameras {view.name}" for view in self.views)}
        return told | {"link": self.link.asked} if self.link.asked != "none" else told
