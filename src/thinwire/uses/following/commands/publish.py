"""``thinwire publish``: make a checkpoint available, each change of it a version."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.links.security import read_token
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.terminal.typer_options import with_config
from thinwire.uses.following.commands.options import PublishConfig

File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A safetensors file, a model's folder, or a Trainer's output_dir."),
]


@with_config(PublishConfig)
def publish(file: File, given: dict[str, Any]) -> None:
    """Make a checkpoint available to followers, and each change of it a version, until Ctrl-C.

    FILE is read when its size and time have rested: see --rest. Of a Trainer's output_dir it is the newest
    checkpoint. Followers connect to --host and --port, or fetch from --store, a path or any URL that fsspec
    writes to; both can be given. With a token links are encrypted, and files in a store are signed.

    [bold]Examples[/bold]

    thinwire publish out/model.safetensors --dtype bf16

    thinwire publish out/ --dtype bf16 --host 0.0.0.0 --token-file secret --store s3://bucket/policy

    thinwire publish scene.tw --layers --host 0.0.0.0 --token-file secret
    """
    config = PublishConfig.from_dict(given)
    token = read_token(config.token_file)
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals())
        try:
            # After the checks, and not for help: it needs torch.
            from thinwire.uses.following.commands.publishing import publish_file

            publish_file(file, config, token, stack)
        except KeyboardInterrupt:  # how it is meant to end
            if config.once:
                raise
