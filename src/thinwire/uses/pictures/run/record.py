"""The record of one way to make a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.runs.options import Options
from thinwire.runs.records.run_record import RunRecord, UnitMetrics, about
from thinwire.uses.pictures.run.options import PicturesConfig


@dataclass(kw_only=True)
class PictureMetrics(UnitMetrics):
    """One repeat: all pictures, denoising alone."""

    repeat: int = about("number of the repeat, from 1")
    step_s: list[float] = about("seconds of each denoising step, picture after picture", make=list)
    wait_s: float = about("seconds in which rank 0 waited for others", 0.0)
    code_s: float = about("seconds in which rank 0 coded and decoded", 0.0)

    @property
    def number(self) -> int:
        """Number of the repeat, from 1."""
        return self.repeat


@dataclass
class PicturesRecord(RunRecord):
    """The record of a picture that one or several machines made."""

    METRICS: ClassVar[type[UnitMetrics]] = PictureMetrics
    CONFIG: ClassVar[type[Options]] = PicturesConfig
    KEYS: ClassVar[dict[str, str]] = {
        "totals.seconds": "seconds of the denoising of all pictures, the median of the repeats",
        "totals.repeats": "how often it was timed",
        "bytes.total": "bytes handed to TCP in one repeat by the rank that sent most, headers included",
        "bytes.first_step": "the same in the first denoising step",
        "bytes.steady_step": "the same in the last one; of spread experts, in the mean of all but the first",
        "bytes.fp16_total": "what plain float16 would be in the same mode, or `ep-sync`; from two steps",
        "bytes.fp16_step": "the same in a later step",
        "bytes.output": "of `total`, for the joined output of the model",
        "bytes.control": "of `total`, for acknowledgements, heartbeats and words between the ranks",
    }
    FREE: ClassVar[frozenset[str]] = RunRecord.FREE | {"recipes"}

    kind: str = about("`pictures`", "pictures")
    unit: str = about("`repeat`: all pictures once", "repeat")
    mode: str = about("how the work was divided: `gather`, `pipe`, `sync`, `one`, ...", "")
    ranks: int = about("processes that took part", 1)
    step_seconds: float = about("seconds of a denoising step, the median", 0.0)
    quality: dict[str, float | None] = about(
        "against the picture of one device with the same noise, floats in 0..1, the mean of all pictures: "
        "`psnr_db` (null where equal), `ssim` in Gaussian windows of `ssim_window` pixels (without that, in "
        "uniform ones of 7), `relative_l2`, `max_abs`; of clips also `flicker_db`, the PSNR of what changes "
        "from frame to frame",
        make=dict,
    )
    compute_s: float = about("seconds of a repeat that rank 0 neither waited nor coded", 0.0)
    wait_s: float = about("seconds of a repeat in which rank 0 waited for others", 0.0)
    code_s: float = about("seconds of a repeat in which rank 0 coded and decoded", 0.0)
    comm_to_compute: float | None = about("waiting and coding over compute", None)
    exchanges: int = about("messages that rank 0 posted in a repeat", 0)
    frames: int = about("frames of a picture: 1, or those of a clip", 1)
    picture: str = about("file of the first picture, beside the record; a clip is an animated PNG", "")
    preview: str = about("the first picture as PNG in base64, for the report", "")
    difference: str = about("its difference from one device's, ten times as strong, in the same form", "")
    predicted_s: float | None = about("seconds of a repeat as predicted before the run", None)
    predictions: dict[str, Any] = about(
        "with `auto`: seconds and dB that were expected of each way it chose from", make=dict
    )

    def __post_init__(self) -> None:
        self.totals.setdefault("repeats", 0)
