"""``thinwire demo pictures``: one picture by two machines, in several ways."""

from __future__ import annotations

from typing import Any

from thinwire.runs.emulator.availability import as_emulated
from thinwire.runs.machine.standard_streams import tell
from thinwire.runs.terminal.typer_options import with_config
from thinwire.uses.pictures.run.options import PicturesConfig

PICTURES_SHOWN = (
    "sheet",
    "classes",
    "steps",
    "link",
    "seed",
    "psnr",
    "device",
    "dtype",
    "out",
    "json",
    "quiet",
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
    from thinwire.uses.pictures.commands.generate import run_all as generate_all

    emulate, how = as_emulated()
    config = PicturesConfig.from_dict(given | {"recipes": " ".join(WAYS), "emulate": emulate})
    if not config.json:
        tell(f"{len(WAYS)} ways to make one sheet over a link of {config.link}, {how}")
    generate_all(config)
