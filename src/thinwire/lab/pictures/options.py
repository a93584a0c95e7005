"""The options of runs that make pictures, from which command line, TOML keys and records follow."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from thinwire.lab.options import option
from thinwire.lab.pictures.sheets import Sheet
from thinwire.lab.ranks.config import MACHINES, RunConfig
from thinwire.types import InputError, require

PICTURE = "Picture"
AUTO, ONE, GUIDANCE = "auto", "one", "guidance"
MOST_RANKS = 8


@dataclass(frozen=True)
class PicturesConfig(RunConfig):
    """What is made, in which ways, by how many processes. ``recipes``: their names, blanks in between."""

    recipes: str = option("auto", PICTURE, "How the work is divided and what is sent.", metavar="NAMES")
    model: str = option(
        "flux-fashion",
        PICTURE,
        "The model; own ones go by thinwire.parallel.",
        choices=("flux-fashion",),
        metavar="MODEL",
    )
    init: str | None = option(
        None, PICTURE, "'random' takes random weights.", metavar="random", choices=("random",)
    )
    sheet: str = option("4x8", PICTURE, "Rows and columns of garments, one sample.", metavar="RxC")
    classes: str = option(
        "", PICTURE, "A class from 0 to 9 for each garment; 0 to 9 in turn unless given.", metavar="C,C,..."
    )
    pictures: int = option(1, PICTURE, "How many pictures, each of its own noise.", least=1, most=1000)
    steps: int = option(28, PICTURE, "Denoising steps.", metavar="N", least=1, most=1000)
    guidance: float = option(
        1.0, PICTURE, "How far from the picture without text; 1 takes one forward a step.", least=0, most=50
    )
    repeat: int = option(1, PICTURE, "How often each way is timed, all in turn.", least=1, most=100)
    psnr: float = option(
        40.0, PICTURE, "What auto keeps to at least: dB against one device.", least=0, most=200
    )
    ranks: int = option(2, MACHINES, "Processes.", metavar="N", least=1, most=MOST_RANKS)
    out: str = option("runs/pictures", PICTURE, "Folder of the runs, which replaces those there.")

    @property
    def ways(self) -> list[str]:
        """The recipes, in the order asked."""
        return shlex.split(self.recipes)

    @property
    def scene(self) -> Sheet:
        """The sheet that is made."""
        return Sheet.parse(self.sheet, self.classes)

    def check(self) -> None:
        """Raise ``InputError`` for a sheet or a way that cannot be."""
        # Imported here, because a reader of records needs no diffusers.
        from thinwire.recipes.diffusion import parse_diffusion_recipe

        super().check()
        names = self.ways
        require(bool(names), InputError, "no way to make a picture is named; give auto, one or compact")
        text = "guidance gives each of two ranks one of two forwards a step, and --guidance 1 takes one"
        off = self.guidance == 1
        require(not (off and GUIDANCE in names), InputError, f"{text}; give --guidance 3, or another way")
        for i, name in enumerate(names):
            require(name not in names[:i], InputError, f"{name} is named twice; name each way once")
            if name != AUTO:
                parse_diffusion_recipe(name)
        _ = self.scene
