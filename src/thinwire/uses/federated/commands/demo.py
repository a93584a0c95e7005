"""``thinwire demo federated``: ten devices learn together, by four methods."""

from __future__ import annotations

from typing import Any

from thinwire.runs.machine.standard_streams import tell
from thinwire.runs.terminal.typer_options import with_config
from thinwire.uses.federated.run.options import FederatedConfig

FEDERATED_SHOWN = ("until", "budget", "seeds", "device", "dtype", "workers", "out", "json", "quiet")
FEDERATED_DEMO: dict[str, Any] = {
    "methods": "fedavg fedbuff fedluck thinwire",
    "data": "fashion-mnist",
    "split": "dirichlet:1.0",
    "devices": "ten-one-straggler",
    "clients": 10,
    "until": 0.78,
    "budget": "1h",
    "rounds": 2400,
    "eval_every": 2,
    "steps": 20,
    "lr": 0.1,
    "out": "runs/demo-federated",
}
REAL, REAL_ROUNDS = "thinwire", 5  # what real processes run too, and how many versions


@with_config(FederatedConfig, defaults=FEDERATED_DEMO, only=FEDERATED_SHOWN)
def federated(given: dict[str, Any]) -> None:
    """Let ten devices on slow links learn Fashion-MNIST, by three published methods and ours.

    Each holds its own share of the images, and one is far slower than the others. Each method runs to 78 % or
    a virtual hour. Then real processes make five versions by thinwire, which must come to the bits of one
    process. About two minutes on two cores. Ends with the bytes and the virtual time that each took, and
    OUT/report.html.
    """
    from thinwire.uses.federated.commands.federate import run as federate_all

    config = FederatedConfig.from_dict(given)
    if not (config.json or config.quiet):
        links = "20 to 60 kbit/s up and four times that down, one straggles"
        tell(f"{len(config.ways)} methods for {config.clients} devices: {links}")
    federate_all(config, REAL, REAL_ROUNDS)
