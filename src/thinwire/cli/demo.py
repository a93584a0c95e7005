"""``thinwire demo`` and its commands: what thinwire is for, shown in a few minutes."""

from __future__ import annotations

import typer

from thinwire.uses import uses

demo = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
for _use in uses():
    for _name, _home in _use.demos.items():
        (demo.command(_name) if _name else demo.callback())(_use.named(_home))
