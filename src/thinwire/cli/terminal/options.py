"""Command-line options made from a configuration's fields: one list of names, defaults and help texts."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.lab.options import Options, flag, from_text
from thinwire.lab.ranks.config import JOB, RunConfig
from thinwire.lab.ranks.rendezvous import under_torchrun

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE.toml", help="Read options from a TOML file first.", rich_help_panel=JOB
    ),
]
Command = Callable[..., None]


def with_config(
    config: type[Options],
    defaults: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    helps: Mapping[str, str] | None = None,
    undecided: tuple[str, ...] = (),
    unused: tuple[str, ...] = (),
) -> Callable[[Command], Command]:
    """Add an option for each field of ``config`` to a command.

    The command's parameter ``given`` receives the options that were given, over a rank's ``THINWIRE_HOST``,
    over ``--config``'s file, over ``defaults``; what nobody gave is left to ``config``. ``only`` takes
    these fields and no file; ``without`` leaves these to the file, and ``unused`` has them nowhere. ``helps``
    replaces the help of options that mean something else in this command; the ``undecided`` have no default
    in it.
    """
    fields = fields_of(config)
    base, told = dict(defaults or {}), {n: f.metadata["help"] for n, f in fields.items()} | dict(helps or {})
    names = [n for n in fields if n not in without + unused and (not only or n in only)]

    def decorate(command: Command) -> Command:
        def run(**arguments: Any) -> None:
            file = arguments.pop("config", None)
            given = {n: from_text(config, n, v) for n in names if (v := arguments.pop(n)) is not None}
            around = _environment() if "host" in names else {}
            command(
                given=base | (config.read_toml(file, unused) if file else {}) | around | given, **arguments
            )

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        parameters = own + ([] if only else [_parameter("config", ConfigFile)])
        annotations = {n: _annotation(fields[n], base, told[n], n not in undecided) for n in names}
        parameters += [_parameter(n, a) for n, a in annotations.items()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _environment() -> dict[str, str]:
    """Return what the environment says of a rank that somebody else started: the address that is its own."""
    host = os.environ.get("THINWIRE_HOST", "").strip()
    return {"host": host} if host and {"RANK", "WORLD_SIZE"} <= os.environ.keys() else {}


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def fields_of(config: type[Options]) -> dict[str, dataclasses.Field[Any]]:
    """Return a configuration's fields by name: its own first, then those of the classes it is made from."""
    classes = [inspect.get_annotations(c) for c in config.__mro__]
    order = list(dict.fromkeys(name for names in classes for name in names))
    return {f.name: f for f in sorted(dataclasses.fields(config), key=lambda f: order.index(f.name))}


def _annotation(f: dataclasses.Field[Any], defaults: Mapping[str, Any], about: str, decided: bool) -> Any:
    default = defaults.get(f.name, f.default)
    text = about.replace("[", r"\[")
    if decided and default is not None and not isinstance(default, bool):
        text += rf" [dim]\[default: {default}][/dim]"
    declared = flag(f.name)
    if isinstance(f.default, bool):
        declared += "/--no-" + f.name.replace("_", "-") if f.default else ""
    option = typer.Option(
        declared, help=text, metavar=f.metadata["metavar"] or None, rich_help_panel=f.metadata["panel"]
    )
    # Numbers come in as text, so that one place, TrainConfig's, refuses wrong ones in one wording.
    return Annotated[bool | None if isinstance(f.default, bool) else str | None, option]


def is_leader(config: RunConfig) -> bool:
    """Say whether this process speaks for the run: always, except as a later rank under torchrun."""
    return not under_torchrun(config) or os.environ["RANK"] == "0"
