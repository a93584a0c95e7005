"""``thinwire train-drafts``: a small head that says ahead what a model will say."""

from __future__ import annotations

from typing import Any

from thinwire.runs.machine.standard_streams import print_json, tell
from thinwire.runs.terminal.activity import fetch_needs
from thinwire.runs.terminal.typer_options import with_config
from thinwire.uses.serving.run.drafts.draft_options import DraftsConfig


@with_config(DraftsConfig)
def train_drafts(given: dict[str, Any]) -> None:
    """Train a draft head for a language model, on a machine that holds the model.

    serve --drafts FILE then sends its proposals with each trip around the stages.

    [bold]Example[/bold]

    thinwire train-drafts --model llama/ --data texts/ --out drafts.safetensors
    """
    config = DraftsConfig.from_dict(given)
    # After the checks: a wrong option is refused before the engine is even imported.
    from thinwire.uses.serving.run.drafts import draft_program

    quiet = config.json or config.quiet
    fetch_needs(config.model, config.data, quiet=quiet)
    found = draft_program.train(config, (lambda text: None) if quiet else tell)
    if config.json:
        print_json(found.plain())
        return
    right = ", ".join(f"{share:.0%}" for share in found.right)
    tell(f"{config.out}: {found.nbytes / 1e6:.1f} MB; of tokens 1, 2, ... ahead, {right} as the model says")
