"""``thinwire view``: a scene as a page that a browser shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli.pack_model import WEIGHTS, is_packed_model
from thinwire.cli.terminal.options import with_config
from thinwire.cli.terminal.output import tell
from thinwire.cli.terminal.scene_places import check_new, is_folder, read_packed, read_pieces
from thinwire.lab import shared
from thinwire.lab.options import Options, option
from thinwire.replacing import replacing
from thinwire.types import InputError, PayloadError, require

Source = Annotated[
    str,
    typer.Argument(
        metavar="IN",
        help="A packed scene, its URL, a folder or store of its layers, or a .ply, .spz, .splat or .sog.",
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write: page.html.")]


@dataclass(frozen=True)
class ViewConfig(Options):
    """What stands on a page, and whether it may replace another."""

    title: str = option("", "", "What the page is called, else as IN is.", metavar="TEXT")
    credit: str = option("", "", "Who made the scene, which stands on every picture of it.", metavar="TEXT")
    force: bool = shared.force()


@with_config(ViewConfig, file=False)
def view(source: Source, out: Out, given: dict[str, Any]) -> None:
    """Write one page that shows a scene in any browser with WebGL2, and needs nothing else.

    It shows a packed scene's layers as they come: over a slow link a coarse scene at once, then a finer one.

    [bold]Examples[/bold]

    thinwire view scene.tw -o page.html

    thinwire view scene.tw -o page.html --credit "PLAYBOT by Stephane Agullo, CC-BY-4.0"
    """
    config = ViewConfig.from_dict(given)
    check_new(out, config.force)
    model = Path(source).suffix != WEIGHTS and is_packed_model(Path(source))
    told = f"{source} is a packed model, and a page shows scenes; thinwire inspect says what is in it"
    require(not model, InputError, told)
    text = _page(source, config.title or Path(source.partition("?")[0]).stem, config.credit)
    page = text.encode(errors="replace")  # the name of a file may be no text
    with replacing(out) as part:
        part.write_bytes(page)
    tell(f"{out}: {len(page)} bytes, which any browser with WebGL2 shows")


def _page(source: str, title: str, credit: str) -> str:
    # Not above: a wrong option is refused before numpy is even imported.
    from thinwire.assets.splats.files.container import read_scene
    from thinwire.assets.splats.files.scene_file import form_of, read_scene_file
    from thinwire.assets.splats.page.writing import page_of, page_of_scene
    from thinwire.assets.splats.scene import cleaned

    own = is_folder(source) and not (Path(source) / "meta.json").is_file()  # else a folder of SOG
    if not own and form_of(Path(source)):
        splats, _ = read_scene_file(Path(source))
        return page_of_scene(cleaned(splats)[0], title, credit)
    data = read_pieces(source) if own else read_packed(source)
    try:
        return page_of(read_scene(data), title, credit)
    except PayloadError as e:
        raise PayloadError(f"{source}: {e}") from e
