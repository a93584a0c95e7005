"""The options of runs that make pictures, from which command line, TOML keys and records follow."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinwire.runs import options as shared
from thinwire.runs.options import DTYPES, option
from thinwire.runs.ranks.run_config import MACHINES, RunConfig
from thinwire.types import InputError, require

if TYPE_CHECKING:
    from thinwire.choosing.registry import Recipe, Registry
    from thinwire.uses.pictures.run.sheets import Sheet
    from thinwire.uses.pictures.run.video.clips import Clip

PICTURE = "Picture"
AUTO, ONE, BATCH, GUIDANCE = "auto", "one", "batch", "guidance"
FLUX, EXPERTS, WAN = "flux-fashion", "flux-fashion-moe", "wan-fashion"
# Unless given; what one model has and another lacks is refused there.
OWN: dict[str, dict[str, Any]] = {
    FLUX: {"sheet": "4x8", "pictures": 1},
    EXPERTS: {"sheet": "1x1", "pictures": 32},
    WAN: {"frames": 16, "canvas": "64x64", "pictures": 1},
}
MOST_RANKS = 8


@dataclass(frozen=True)
class PicturesConfig(RunConfig):
    """What is made, in which ways, by how many processes. ``recipes``: their names, blanks in between."""

    recipes: str = option("auto", PICTURE, "How the work is divided and what is sent.", metavar="NAMES")
    model: str = option(
        FLUX,
        PICTURE,
        "The model; own ones go by thinwire.parallel or spread_experts.",
        choices=tuple(OWN),
        metavar="MODEL",
    )
    init: str | None = option(
        None, PICTURE, "'random' takes random weights.", metavar="random", choices=("random",)
    )
    sheet: str | None = option(
        None, PICTURE, "Rows and columns of garments, one sample: 4x8, or 1x1 of experts.", metavar="RxC"
    )
    frames: int | None = option(
        None, PICTURE, "Frames of a clip of wan-fashion: 16, or another even number.", metavar="N"
    )
    canvas: str | None = option(
        None, PICTURE, "Height and width of a clip in pixels, multiples of 4: 64x64.", metavar="HxW"
    )
    classes: str = option(
        "",
        PICTURE,
        "A class from 0 to 9 for each garment; 0 to 9 in turn unless given, a bag and a sneaker in a clip.",
        metavar="C,C,...",
    )
    pictures: int = option(
        None,
        PICTURE,
        "How many pictures, each of its own noise: 1, or 32 of experts.",
        metavar="N",
        least=1,
        most=1000,
    )
    steps: int = option(28, PICTURE, "Denoising steps.", metavar="N", least=1, most=1000)
    guidance: float = option(
        1.0, PICTURE, "How far from the picture without text; 1 takes one forward a step.", least=0, most=50
    )
    repeat: int = option(1, PICTURE, "How often each way is timed, all in turn.", least=1, most=100)
    psnr: float = option(
        40.0, PICTURE, "What auto keeps to at least: dB against one device.", least=0, most=200
    )
    device: str = shared.device(MACHINES)
    dtype: str = option(
        "fp32",
        PICTURE,
        "What to compute in; what auto expects of each way was measured in fp32.",
        metavar="NAME",
        choices=DTYPES,
    )
    ranks: int = option(2, MACHINES, "Processes.", metavar="N", least=1, most=MOST_RANKS)
    out: str = option("runs/pictures", PICTURE, "Folder of the runs, which replaces those there.")

    @property
    def ways(self) -> list[str]:
        """The recipes, in the order asked."""
        return shlex.split(self.recipes)

    @property
    def scene(self) -> Sheet | Clip:
        """The sheet or the clip that is made."""
        from thinwire.uses.pictures.run.sheets import Sheet
        from thinwire.uses.pictures.run.video.clips import Clip

        if self.frames is not None and self.canvas is not None:
            return Clip.parse(self.frames, self.canvas, self.classes)
        return Sheet.parse(self.sheet or "", self.classes)

    def __post_init__(self) -> None:
        own = OWN.get(self.model, OWN[FLUX])  # of a model that is not known: as its name is refused below
        for name in dict.fromkeys(name for values in OWN.values() for name in values):
            if name in own and getattr(self, name) is None:
                object.__setattr__(self, name, own[name])
            others = " and ".join(model for model, values in OWN.items() if name in values)
            text = (
                f"--{name} is for {others}, and {self.model} has none; leave it out, or give another --model"
            )
            require(self.model not in OWN or name in own or getattr(self, name) is None, InputError, text)
        super().__post_init__()

    def recipe(self, name: str) -> Recipe[Any, Any]:
        """Return the recipe of a name, among those of the model. Errors: ``InputError``."""
        # Imported here, because a reader of records needs no diffusers.
        from thinwire.uses.pictures.context_parallel.recipes import DIFFUSION
        from thinwire.uses.pictures.expert_parallel.recipes import EXPERTS as SPREAD

        own: Registry[Any, Any] = SPREAD if self.model == EXPERTS else DIFFUSION
        model, others = (FLUX, DIFFUSION) if self.model == EXPERTS else (EXPERTS, SPREAD)
        word = name.partition(":")[0]
        elsewhere = word in others.entries and word not in own.entries
        require(not elsewhere, InputError, f"{word} is a way of {model}; give --model {model}")
        return own.parse(name)

    def validate(self) -> None:
        """Raise ``InputError`` for a sheet, a clip or a way that cannot be."""
        super().validate()
        names = self.ways
        require(bool(names), InputError, "no way to make a picture is named; give auto, one or compact")
        for i, name in enumerate(names):
            require(name not in names[:i], InputError, f"{name} is named twice; name each way once")
            if name != AUTO:
                self.recipe(name)
            else:
                such = "ep-sync or dice" if self.model == EXPERTS else "one or compact"
                text = f"auto chooses among ways of {FLUX}; for {self.model} name ways, such as {such}"
                require(self.model == FLUX, InputError, text)
        text = "guidance gives each of two ranks one of two forwards a step, and --guidance 1 takes one"
        off = self.guidance == 1
        require(not (off and GUIDANCE in names), InputError, f"{text}; give --guidance 3, or another way")
        few = self.model == EXPERTS and self.pictures < self.ranks
        text = f"--pictures {self.pictures} are too few for {self.ranks} ranks, each of which makes its own"
        require(not few, InputError, f"{text}; give {self.ranks} at least")
        _ = self.scene
