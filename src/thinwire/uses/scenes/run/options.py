"""The options of the demo of scenes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from thinwire.links.shape import LinkShape
from thinwire.runs.options import option
from thinwire.runs.ranks.run_config import JOB, RunConfig
from thinwire.types import InputError, require

LEAST_NBYTES = 10_000  # below it a scene has no layers worth a demo


@dataclass(frozen=True)
class ScenesConfig(RunConfig):
    """A scene, and what a link carries of it in some seconds."""

    scene: str | None = option(
        None,
        JOB,
        "A .ply, .compressed.ply, .spz, .splat or .sog, a folder of SOG; by default PLAYBOT, which is there.",
        metavar="IN",
    )
    credit: str | None = option(
        None,
        JOB,
        "The credit in every picture; by default that of a licence beside the scene.",
        metavar="TEXT",
        free=True,
    )
    seconds: float = option(
        3.0, JOB, "Seconds of the link that the whole scene may take.", metavar="S", above=0, most=600
    )

    @property
    def ranks(self) -> int:
        """A sender and a receiver."""
        return 2

    @property
    def shape(self) -> LinkShape:
        """The link's shape."""
        return LinkShape.parse(self.link)

    @property
    def nbytes(self) -> int:
        """Bytes that the link carries in those seconds."""
        left = self.seconds - self.shape.delay
        return int(left * (self.shape.rate or math.inf)) if left > 0 else 0

    def validate(self) -> None:
        """Raise ``InputError`` for a link without a rate, and one that carries too little."""
        super().validate()
        told = f"--link {self.link} has no rate, so no bytes follow from it; write it like 1mbit,30ms"
        require(self.shape.rate is not None, InputError, told)
        told = f"{self.link} carries {self.nbytes} bytes in --seconds {self.seconds:g}; give more of either"
        require(self.nbytes >= LEAST_NBYTES, InputError, told)
        if self.scene is not None:
            require(Path(self.scene).exists(), InputError, f"there is no --scene {self.scene}; give a file")
