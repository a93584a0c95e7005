"""What ``thinwire inspect`` finds, and how it prints that."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire.files.base import Folder, shown
from thinwire.files.file_kinds import read_notes
from thinwire.files.local_folder import PlainFolder, open_folder
from thinwire.links.address import Address
from thinwire.links.security import check_host
from thinwire.runs.machine.network import check_listener
from thinwire.runs.machine.standard_streams import PLAIN_WIDTH, draws
from thinwire.runs.records.progress import megabytes
from thinwire.runs.terminal.addresses import limited
from thinwire.runs.terminal.live import Live, await_coming, printable
from thinwire.state.layout import Layout
from thinwire.state.patches import body
from thinwire.state.patches.patch import is_time
from thinwire.types import InputError, LinkError, PayloadError, ThinwireError, require
from thinwire.uses.following.mirror import Mirror
from thinwire.uses.following.pull.claim import read_manifest
from thinwire.uses.following.pull.manifest import Manifest, Proof
from thinwire.uses.following.pull.store_fetching import Fetching, look
from thinwire.uses.following.push.follower import Follower, ask
from thinwire.uses.models.about_packed_model import describe_codes
from thinwire.uses.models.codes import is_codes
from thinwire.uses.readers import describe_file, describe_folder

TIMEOUT = 20.0  # seconds that a publisher has to answer


def find(
    place: Path | Address | str, token: bytes | None, check: bool, most: int, patience: float
) -> dict[str, Any]:
    """Return what a file, a publisher or a store holds, for ``show``. Errors: those of the command."""
    if isinstance(place, Path):
        return describe_file(place, check) or _file(place, check)
    limits = token, check, most
    with limited(shown(str(place))):
        return _store(place, *limits) if isinstance(place, str) else _publisher(place, *limits, patience)


def _publisher(at: Address, token: bytes | None, check: bool, most: int, patience: float) -> dict[str, Any]:
    check_host(at.host, token)
    check_listener(*at, token is not None, "publish")  # which says at once why nobody would answer
    offer = ask(*at, token, TIMEOUT, most)
    found = {"kind": "publisher", "where": str(at), "name": offer.name, "version": offer.newest}
    if check and not offer.newest:
        found |= _checked("it has published nothing yet")
    elif check:
        with Follower(*at, token, max_nbytes=most) as follower:
            _fetch(follower, offer.layout, at, patience)
            follower.tensors()
            follower.replica.check()
            version = follower.replica.shown
            found |= {"version": version.number, "hash": f"{version.hash:016x}", "checked": True}
    return found | _tensors(offer.layout)


def _fetch(follower: Follower, layout: Layout, at: Address, patience: float) -> None:
    """Wait for a whole state, as long as it comes."""

    def line() -> str:
        return f"{megabytes(follower.status.nbytes)} of at most about {megabytes(layout.nbytes)}"

    with Live(line, quiet=not draws(sys.stderr)):
        came = await_coming(
            lambda: follower.wait(0).number > 0,  # raises what went wrong
            lambda: follower.status.nbytes,
            patience,
        )
    if came is not None:
        raise LinkError(f"{at} sent {came} bytes in {patience:g} s; see what holds it up")


def _store(url: str, token: bytes | None, check: bool, most: int) -> dict[str, Any]:
    folder = open_folder(url)
    try:
        manifest, layout = look(folder, token, most)
        problems = _problems(folder, manifest, layout, token, most) if check else []
    except FileNotFoundError as e:
        asset = _asset(folder, check)
        if asset is not None:
            return asset
        there = not isinstance(folder, PlainFolder) or folder.path.exists()
        require(there, InputError, f"there is no {folder.where}; give a file, a store or a HOST:PORT")
        raise InputError(f"{folder.where} holds no state; publish one with --store {folder.where}") from e
    except OSError as e:
        raise LinkError(f"{folder.where} holds no state that can be read: {e}") from e
    newest, versions = manifest.newest, manifest.versions
    found = {
        "kind": "store",
        "where": folder.where,
        "name": manifest.name,
        "version": newest.number if newest else 0,
        "signed": token is not None,
        "alive": manifest.lease > 0 and time.time() - manifest.written < manifest.lease,
        "versions": [_fields(v, "number", "published") | {"hash": f"{v.hash:016x}"} for v in versions],
        "files": [
            {"name": f.name, "base": f.base, "version": f.version, "nbytes": f.nbytes} for f in manifest.files
        ],
    }
    if problems:
        raise PayloadError(
            f"{folder.where}: {'; '.join(problems)}; its publisher will mend it, or follow anew"
        )
    return found | ({"checked": True} if check else {}) | _tensors(layout)


def _asset(folder: Folder, check: bool) -> dict[str, Any] | None:
    try:
        return describe_folder(folder, check)
    except OSError as e:
        raise LinkError(f"{folder.where} holds nothing that can be read: {e}") from e


def _problems(
    folder: Folder, manifest: Manifest, layout: Layout, token: bytes | None, most: int
) -> list[str]:
    """Return what is wrong with the files, and with what following them leads to.

    Not with those that its publisher, which may go on meanwhile, does not name any more.
    """
    proof, limit, found = Proof(token), body.most(layout), []
    for file in manifest.files:
        try:
            fits = file.nbytes <= limit  # else whoever wrote the manifest says how much memory this takes
            require(fits, PayloadError, f"{file.nbytes} bytes, at most {limit} fit its state")
            whole = proof.fits(file.name, folder.read(file.name, file.nbytes), file.check)
        except (OSError, PayloadError) as e:
            found.append((file, f"{file.name} cannot be read ({e})"))
        else:
            found += [] if whole else [(file, f"{file.name} is damaged")]
    named = read_manifest(folder, proof).files if found else ()
    problems = [problem for file, problem in found if file in named]
    if manifest.newest is not None and not problems:
        try:
            Fetching(folder, proof, Mirror(max_nbytes=most)).look()
        except ThinwireError as e:
            problems.append(str(e))
    return problems


def _file(path: Path, check: bool) -> dict[str, Any]:
    notes = read_notes(path)
    own: dict[str, Any] = {"kind": notes.kind, "where": str(path), "nbytes": notes.nbytes}
    if check:
        own |= _checked(notes.check())
    if notes.layout is not None and is_codes([slot.name for slot in notes.layout.slots]):
        return own | {"holds": "codes of a packed model"} | describe_codes(path)
    found = own | {k: v for k, v in notes.known.items() if k not in own and k != "checked"}
    return found | (_tensors(notes.layout) if notes.layout is not None else {})


def _checked(reason: str) -> dict[str, Any]:
    """Return that all was checked, or for what reason it was not."""
    return {"checked": False, "reason": reason} if reason else {"checked": True}


def _fields(x: object, *names: str) -> dict[str, Any]:
    return {name: getattr(x, name) for name in names}


def _tensors(layout: Layout) -> dict[str, Any]:
    tensors = [
        {
            "name": slot.name,
            "shape": list(slot.shape),
            "dtype": str(slot.dtype).removeprefix("torch."),
            "nbytes": slot.nbytes,
        }
        | ({} if slot.bound is None else {"bound": slot.bound})
        for slot in layout.slots
    ]
    found: dict[str, Any] = {"state_nbytes": layout.nbytes, "numel": layout.numel, "tensors": tensors}
    return found | ({"tied": dict(layout.aliases)} if layout.aliases else {})


def show(found: Mapping[str, Any]) -> None:
    """Print what was found."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    tables = ("tensors", "versions", "files", "layers", "streams")
    if found.get("checked") is False:  # one line says both
        found = {k: v for k, v in found.items() if k != "reason"} | {"checked": f"no, {found['reason']}"}
    for key, value in found.items():
        if key not in tables or not isinstance(value, list):  # meta data may be called so
            text = printable(f"{key.replace('_', ' ')}: {_words(key, value)}")
            console.print(text, markup=False, soft_wrap=True)
    for key in tables:
        rows = found.get(key)
        if rows and isinstance(rows, list):
            console.print()
            console.print(_table(rows))


def _words(key: str, value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)  # meta data may be a text
    if key == "published" and number and value and is_time(value):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if key.endswith("nbytes") and number:
        return f"{value} ({megabytes(value)})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(f"{k} = {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        right = name in ("nbytes", "number", "base", "prefix", "splats") or name.startswith("layer")
        table.add_column(name.replace("nbytes", "bytes"), justify="right" if right else "left")
    for row in rows:
        table.add_row(*(escape(printable(_cell(name, row.get(name)))) for name in names))
    return table


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "published":
        return _words(name, value)
    return " × ".join(map(str, value)) or "scalar" if isinstance(value, list) else str(value)
