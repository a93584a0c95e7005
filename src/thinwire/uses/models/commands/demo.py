"""``thinwire demo models``: a language model packed to three bits a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.links.shape import LinkShape
from thinwire.runs.machine.standard_streams import print_json, tell
from thinwire.runs.terminal.activity import fetch_needs

ModelsOut = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder of the packed model and its record.")
]
ModelsLink = Annotated[str, typer.Option("--link", help="The link that downloads are timed for.")]
Json = Annotated[bool, typer.Option("--json", help="Print the record, and nothing else, on stdout.")]


def models(
    out: ModelsOut = Path("runs/demo-models"), link: ModelsLink = "10mbit,30ms", json: Json = False
) -> None:
    """Pack SmolLM2-135M to 3 bits a weight, by what Shakespeare says of its weights.

    Ends with bytes, seconds over the link, perplexity and a sentence of the source, of ours, and of weights
    rounded to the nearest 3 bits. A minute and a half on two cores. OUT has model.tw, run.json, report.html.
    """
    shape = LinkShape.parse(link)
    from thinwire.runs.records.folder_lock import holding
    from thinwire.uses.models.run.packing_demo import DemoModel, run

    wanted = DemoModel(out, shape)
    fetch_needs(wanted.model, wanted.text, quiet=json)
    with holding(out):
        record = run(wanted, (lambda _: None) if json else tell)
    if json:
        print_json(record.to_dict())
    else:
        tell(f"{out}: model.tw, which thinwire unpack makes a folder for transformers, and report.html")
