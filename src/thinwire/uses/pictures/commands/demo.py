"""``demo pictures`` and ``demo video``: one picture, or one clip, by two machines, in several ways."""

from __future__ import annotations

from typing import Any

from thinwire.runs.emulator.availability import as_emulated
from thinwire.runs.machine.files import check_out
from thinwire.runs.machine.standard_streams import tell
from thinwire.runs.terminal.typer_options import with_config
from thinwire.uses.pictures.run.options import WAN, PicturesConfig

PICTURES_SHOWN = (
    "sheet",
    "classes",
    "steps",
    "link",
    "seed",
    "device",
    "dtype",
    "out",
    "json",
    "quiet",
    "psnr",
)
PICTURES_DEMO: dict[str, Any] = {"link": "100mbit,5ms", "out": "runs/demo-pictures"}
WAYS = ("one", "fp16", "displaced", "pipe-fp16", "compact", "compact:bits=2", "compact-pipe")


@with_config(PicturesConfig, defaults=PICTURES_DEMO, only=PICTURES_SHOWN)
def pictures(given: dict[str, Any]) -> None:
    """Make one sheet of 32 garments on two machines over 100 Mbit/s and 5 ms, in several ways.

    One machine alone, float16, two published ways that use values of the last step, and ours. The link is
    emulated below the kernel's TCP where this machine can, else shaped in the processes. About four minutes
    on two cores. Ends with a table and OUT/report.html: the sheets side by side, and how they differ.
    """
    _shown(given, WAYS, "sheet")


VIDEO_SHOWN = ("frames", "canvas", *PICTURES_SHOWN[1:-1])  # no auto chooses, so no --psnr
VIDEO_DEMO = PICTURES_DEMO | {"out": "runs/demo-video"}
VIDEO_WAYS = ("one", "pipe-fp16", "compact-pipe")


@with_config(PicturesConfig, defaults=VIDEO_DEMO, only=VIDEO_SHOWN)
def video(given: dict[str, Any]) -> None:
    """Make one clip of moving garments on two machines over 100 Mbit/s and 5 ms, in several ways.

    One machine alone, then blocks of the model over two machines: as float16, and as what has changed. The
    link is emulated as in demo pictures. About a minute on two cores. Ends with a table and
    OUT/report.html, in which the clips play side by side.
    """
    _shown(given | {"model": WAN}, VIDEO_WAYS, "clip")


def _shown(given: dict[str, Any], ways: tuple[str, ...], what: str) -> None:
    """Make one sheet or clip in these ways, over a link emulated where that can be."""
    from thinwire.uses.pictures.commands.generate import run_all as generate_all

    emulate, how = as_emulated()
    config = PicturesConfig.from_dict(given | {"recipes": " ".join(ways), "emulate": emulate})
    check_out(config.out)
    if not (config.json or config.quiet):
        tell(f"{len(ways)} ways to make one {what} over a link of {config.link}, {how}")
    generate_all(config)
