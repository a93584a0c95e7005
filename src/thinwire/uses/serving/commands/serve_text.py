"""``thinwire serve`` and ``thinwire generate-text``: a language model by stages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.runs.machine.standard_streams import print_json, tell
from thinwire.runs.ranks.rendezvous import starts_all
from thinwire.runs.records.folder_lock import holding
from thinwire.runs.terminal.activity import fetch_needs
from thinwire.runs.terminal.typer_options import with_config
from thinwire.types import MissingExtra
from thinwire.uses.serving.run.options import ContinueConfig, EndpointConfig

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The text to go on from.")]


@with_config(EndpointConfig)
def serve(given: dict[str, Any]) -> None:
    """Serve a language model, cut into stages, behind an endpoint like OpenAI's.

    Starts one process a stage on this machine, or joins the others under torchrun. The first one listens.

    [bold]Examples[/bold]

    thinwire serve --model smollm2-135m --stages 2

    thinwire serve --model llama/ --stages 2 --listen 0.0.0.0:8000 --api-key-file key --token-file secret
    """
    config = EndpointConfig.from_dict(given)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as e:
        raise MissingExtra("an endpoint needs starlette and uvicorn: pip install 'thinwire[serve]'") from e
    # After the checks: a wrong option is refused before the engine is even imported.
    from thinwire.uses.serving.run import endpoint_program, serving_launch

    if not starts_all(config):
        endpoint_program.run_rank(config)
        return
    fetch_needs(config.model, "", quiet=config.quiet)
    with holding(Path(config.out)):
        serving_launch.serve(config, lambda address: tell(f"listening at http://{address}/v1"))


@with_config(ContinueConfig, without=("prompt",))
def generate_text(prompt: Prompt, given: dict[str, Any]) -> None:
    """Continue one prompt by a language model that is cut into stages.

    [bold]Examples[/bold]

    thinwire generate-text "The city of Paris" --stages 2 --link 20mbit,20ms --emulate
    """
    config = ContinueConfig.from_dict(given | {"prompt": prompt})
    from thinwire.uses.serving.run import continue_program, serving_launch

    if not starts_all(config):
        continue_program.run_rank(config)
        return
    fetch_needs(config.model, "", quiet=config.quiet)
    quiet = config.json
    with holding(Path(config.out)):
        ended = serving_launch.go_on(config, (lambda text: None) if quiet else _show)
    if config.json:
        print_json(ended)
        return
    sys.stdout.write("\n")
    tell(
        f"{ended['tokens']} tokens, the first after {ended['first_token_s']:.2f} s, then "
        f"{ended['tokens_per_second']:.1f} a second; {ended['rounds']} trips"
    )


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
