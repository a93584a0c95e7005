"""``thinwire demo``: the job that shows in a few minutes what thinwire is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.cli.compare import configs_of, run_all
from thinwire.cli.options import with_config
from thinwire.cli.output import tell

RECIPES = ["fp32", "step-delta", "thinwire"]
DEMO: dict[str, Any] = {
    "model": "smollm2-135m",
    "data": "shakespeare",
    "link": "10mbit,30ms",
    "steps": 18,
    "epochs": 3,
    "batch": 4,
    "microbatches": 4,
    "seq": 128,
    "eval_samples": 8,
    "out": "runs/demo",
}
SHOWN = ("model", "data", "link", "steps", "epochs", "seed", "out", "json", "quiet")


@with_config(defaults=DEMO, only=SHOWN)
def demo(given: dict[str, Any]) -> None:
    """Fine-tune SmolLM2-135M on Shakespeare over a home uplink: fp32, a published recipe, and ours.

    Three runs of 18 steps in two processes on this machine, over a link shaped to 10 Mbit/s and 30 ms; about
    five minutes on two cores. Ends with a table and OUT/report.html.
    """
    *others, ours = configs_of(RECIPES, given)
    configs = [*(c.replace(save_model=False) for c in others), ours]
    if not given.get("json"):
        tell(f"three runs of {given['steps']} steps over a link of {given['link']}, one after another")
    run_all(configs, Path(given["out"]))
