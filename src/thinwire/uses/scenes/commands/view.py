"""``thinwire view``: a scene as a page that a browser shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.replacing import replacing
from thinwire.runs import options as shared
from thinwire.runs.machine.standard_streams import tell
from thinwire.runs.options import Options, option
from thinwire.runs.terminal.addresses import check_new
from thinwire.runs.terminal.typer_options import with_config
from thinwire.types import InputError, PayloadError, require
from thinwire.uses.scenes.commands.scene_places import is_folder, read_packed, read_pieces

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
    text = _page(source, config.title or Path(source.partition("?")[0]).stem, config.credit)
    page = text.encode(errors="replace")  # the name of a file may be no text
    with replacing(out) as part:
        part.write_bytes(page)
    tell(f"{out}: {len(page)} bytes, which any browser with WebGL2 shows")


def _page(source: str, title: str, credit: str) -> str:
    # Not above: a wrong option is refused before numpy is even imported.
    from thinwire.uses.scenes.files.packed_scene import read_scene
    from thinwire.uses.scenes.files.scene_file import form_of, read_scene_file
    from thinwire.uses.scenes.page.web_page import page_of, page_of_scene
    from thinwire.uses.scenes.scene import cleaned

    own = is_folder(source) and not (Path(source) / "meta.json").is_file()  # else a folder of SOG
    if not own and form_of(Path(source)):
        splats, _ = read_scene_file(Path(source))
        return page_of_scene(cleaned(splats)[0], title, credit)
    data = read_pieces(source) if own else read_packed(source)
    try:
        return page_of(read_scene(data), title, credit)
    except PayloadError as e:
        from thinwire.uses.readers import kind_of

        other = kind_of(Path(source)) if Path(source).is_file() else None
        told = f"{source} is a {other}, and a page shows scenes; thinwire inspect says what is in it"
        require(other in (None, "packed scene"), InputError, told)
        raise PayloadError(f"{source}: {e}") from e
