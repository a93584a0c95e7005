"""Command-line options made from a configuration's fields: one list of names, defaults and help texts."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.runs.machine.devices import check_there
from thinwire.runs.options import Options, flag, from_text
from thinwire.runs.ranks.rendezvous import under_torchrun
from thinwire.runs.ranks.run_config import JOB, RunConfig

Command = Callable[..., None]
TYPES: dict[str, Any] = {"bool": bool, "tuple[str, ...]": list[str]}  # of fields that take no single word
NUMBERS = {"int": "<int>", "float": "<float>"}  # without a metavar, as typer shows them


def _config_file(panel: str | None) -> Any:
    text = "Read options from a TOML file first."
    option = typer.Option("--config", metavar="FILE.toml", help=text, rich_help_panel=panel)
    return Annotated[Path | None, option]


def with_config(
    config: type[Options],
    defaults: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    helps: Mapping[str, str] | None = None,
    undecided: tuple[str, ...] = (),
    unused: tuple[str, ...] = (),
    file: bool = True,
) -> Callable[[Command], Command]:
    """Add an option for each field of ``config`` to a command.

    The command's parameter ``given`` receives the options that were given, over a rank's ``THINWIRE_HOST``,
    over ``--config``'s file, over ``defaults``; what nobody gave is left to ``config``. ``only`` takes
    these fields and no file; ``without`` leaves these to the file, and ``unused`` has them nowhere. ``helps``
    replaces the help of options that mean something else in this command; the ``undecided`` have no default
    in it. Without ``file`` there is no ``--config``.
    """
    fields = fields_of(config)
    base, told = dict(defaults or {}), {n: f.metadata["help"] for n, f in fields.items()} | dict(helps or {})
    panel = JOB if next(iter(fields.values())).metadata["panel"] else None
    names = [n for n in fields if n not in without + unused and (not only or n in only)]

    old = [fields[n].metadata["old"] for n in names if fields[n].metadata["old"]]

    def decorate(command: Command) -> Command:
        def run(**arguments: Any) -> None:
            path = arguments.pop("config", None)
            said = {n: v for n in (*names, *old) if (v := arguments.pop(n)) not in (None, [])}
            said = config.renamed(said, "the command line")
            given = {n: from_text(config, n, v) for n, v in said.items()}
            read = config.read_toml(path, unused) if path else {}
            given = base | read | _environment([fields[n] for n in names]) | given
            check_there(given.get("device"))  # before anything is loaded, which takes long
            command(given=given, **arguments)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        parameters = own + ([_parameter("config", _config_file(panel))] if file and not only else [])
        annotations = {n: _annotation(fields[n], base, told[n], n not in undecided) for n in names}
        parameters += [_parameter(n, a) for n, a in annotations.items()]
        parameters += [_parameter(n, Annotated[str | None, typer.Option(flag(n), hidden=True)]) for n in old]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _environment(fields: list[dataclasses.Field[Any]]) -> dict[str, str]:
    """Return what the environment says of a rank that somebody else started: the address that is its own."""
    said = {f.name: os.environ.get(f.metadata["variable"], "").strip() for f in fields}
    return {n: v for n, v in said.items() if v} if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else {}


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def fields_of(config: type[Options]) -> dict[str, dataclasses.Field[Any]]:
    """Return a configuration's fields by name: its own first, then those of the classes it is made from."""
    classes = [inspect.get_annotations(c) for c in config.__mro__]
    order = list(dict.fromkeys(name for names in classes for name in names))
    return {f.name: f for f in sorted(dataclasses.fields(config), key=lambda f: order.index(f.name))}


def _annotation(f: dataclasses.Field[Any], defaults: Mapping[str, Any], about: str, decided: bool) -> Any:
    kind = str(f.type).removesuffix(" | None")  # as it is written: its meaning takes long to find
    default = defaults.get(f.name, f.default)
    text = about.replace("[", r"\[")
    if decided and default not in (None, "", ()) and not isinstance(default, bool):
        text += rf" [dim]\[default: {default}][/dim]"
    declared = flag(f.name)
    if kind == "bool":
        declared += "/--no-" + f.name.replace("_", "-") if f.default else ""
    metavar = f.metadata["metavar"] or NUMBERS.get(kind)
    option = typer.Option(declared, help=text, metavar=metavar, rich_help_panel=f.metadata["panel"] or None)
    # Numbers come in as text, so that one place, the dataclass's, refuses wrong ones in one wording.
    return Annotated[TYPES.get(kind, str) | None, option]


def is_leader(config: RunConfig) -> bool:
    """Say whether this process speaks for the run: always, except as a later rank under torchrun."""
    return not under_torchrun(config) or os.environ["RANK"] == "0"
