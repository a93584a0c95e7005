"""``thinwire demo scenes``: a scene packed and sent layer by layer."""

from __future__ import annotations

from typing import Any

from thinwire.runs.machine.standard_streams import print_json, tell
from thinwire.runs.terminal.typer_options import with_config
from thinwire.uses.scenes.run.options import ScenesConfig

SCENES_SHOWN = ("scene", "credit", "seconds", "link", "out", "json", "quiet")
SCENES_DEMO: dict[str, Any] = {"link": "1mbit", "out": "runs/demo-scenes"}
SCENES_HELPS = {
    "link": "The link's rate and one-way delay, as in 1mbit,30ms[,jitter=2ms][,loss=0.1%].",
    "out": "Folder of the record, the packed scene, the pictures and the report; those there are replaced.",
}


@with_config(ScenesConfig, defaults=SCENES_DEMO, only=SCENES_SHOWN, helps=SCENES_HELPS)
def scenes(given: dict[str, Any]) -> None:
    """Pack a scene of 3D Gaussians for three seconds of 1 Mbit/s, and send it layer by layer over that link.

    Another process receives and decodes it, then the same scene as SPZ in one piece. The link is shaped in
    the sender. About half a minute on two cores. Ends with what was seen after how many seconds, and
    OUT/report.html: pictures side by side, how they differ, and PSNR over seconds. OUT/scene.tw is the packed
    scene.
    """
    config = ScenesConfig.from_dict(given)
    from thinwire.runs.records.folder_lock import holding
    from thinwire.runs.terminal.activity import Activity
    from thinwire.uses.scenes.run import cards
    from thinwire.uses.scenes.run.demo_program import run

    with holding(config.out), Activity(config.quiet or config.json, lines=True) as doing:
        record, report = run(config, doing.tell)
    if config.json:
        print_json(record.to_dict())
    else:
        tell("\n".join([*cards.story(record), f"report: {report}"]))
