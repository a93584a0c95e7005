"""``thinwire demo models``: a language model packed to three bits a weight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.links.shape import LinkShape
from thinwire.runs import options as shared
from thinwire.runs.machine.standard_streams import print_json, tell
from thinwire.runs.options import Options, option
from thinwire.runs.terminal.activity import fetch_needs
from thinwire.runs.terminal.typer_options import with_config


@dataclass(frozen=True)
class ModelsDemo(Options):
    """Where the demo leaves what it packs, and where it computes."""

    out: str = option("runs/demo-models", "", "Folder of the packed model and its record.", metavar="DIR")
    link: str = option("10mbit,30ms", "", "The link that downloads are timed for.", metavar="SHAPE")
    device: str = shared.device()
    dtype: str = shared.compute_dtype(default="fp32")
    json: bool = shared.printed("the record")


@with_config(ModelsDemo, file=False)
def models(given: dict[str, Any]) -> None:
    """Pack SmolLM2-135M to 3 bits a weight, by what Shakespeare says of its weights.

    Ends with bytes, seconds over the link, perplexity and a sentence of the source, of ours, and of weights
    rounded to the nearest 3 bits. A minute and a half on two cores. OUT has model.tw, run.json, report.html.
    """
    config = ModelsDemo.from_dict(given)
    out, shape = Path(config.out), LinkShape.parse(config.link)
    from thinwire.runs.records.folder_lock import holding
    from thinwire.uses.models.run.packing_demo import DemoModel, run

    wanted = DemoModel(out, shape, device=config.device, dtype=config.dtype)
    fetch_needs(wanted.model, wanted.text, quiet=config.json)
    with holding(out):
        record = run(wanted, (lambda _: None) if config.json else tell)
    if config.json:
        print_json(record.to_dict())
    else:
        tell(f"{out}: model.tw, which thinwire unpack makes a folder for transformers, and report.html")
