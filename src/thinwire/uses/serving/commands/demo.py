"""``thinwire demo serve``: one model by two machines, in several ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.runs.emulator.availability import as_emulated
from thinwire.runs.machine.standard_streams import tell
from thinwire.runs.records.folder_lock import holding
from thinwire.runs.records.writer import COMPARE, REPORT, forget, write_json
from thinwire.runs.terminal.activity import fetch_needs
from thinwire.runs.terminal.typer_options import with_config
from thinwire.uses.kinds import finish, load_runs
from thinwire.uses.serving.run.options import MeasuredConfig

SHOWN = (
    *("model", "data", "texts", "prompt_tokens", "tokens", "temperature", "at_once", "drafts"),
    *("link", "seed", "device", "dtype", "out", "json", "quiet"),
)
DEMO: dict[str, Any] = {"link": "20mbit,20ms", "out": "runs/demo-serve"}


@with_config(MeasuredConfig, defaults=DEMO, only=SHOWN)
def serve(given: dict[str, Any]) -> None:
    """Continue texts by SmolLM2-135M on one machine, and cut in two over 20 Mbit/s and 40 ms there and back.

    In bf16, with coded prompts, and with drafts. The link is emulated below the kernel's TCP where this
    machine can, else shaped in the processes. Ends with a table and OUT/report.html: the texts side by side.
    """
    from thinwire.uses.serving.run.serving_demo import WAYS, run_ways

    emulate, how = as_emulated()
    config = MeasuredConfig.from_dict(given | {"stages": 2, "emulate": emulate})
    quiet, out = config.json or config.quiet, Path(config.out)
    fetch_needs(config.model, config.data, quiet=quiet)
    if not quiet:
        tell(f"{len(WAYS)} ways to serve {config.model} over a link of {config.link}, {how}")
    with holding(out):
        forget(out, COMPARE, REPORT)
        records = run_ways(config, WAYS, (lambda text: None) if quiet else tell)
        folders = [out / way.name for way in WAYS]
        write_json(out / COMPARE, [record.to_dict() for record in records])
    finish(load_runs(folders), out, config.json, [record.to_dict() for record in records])
