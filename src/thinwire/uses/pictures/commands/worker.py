"""``thinwire worker``: wait for a host, and make its calls of a model with it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.links.address import WORKER_PORT, Address
from thinwire.links.security import check_host, read_token
from thinwire.runs import options as shared
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.machine.standard_streams import tell
from thinwire.runs.options import Options, option, seconds
from thinwire.runs.terminal.addresses import reached_at
from thinwire.runs.terminal.live import printable
from thinwire.runs.terminal.typer_options import with_config
from thinwire.types import InputError, require

LISTEN = f"0.0.0.0:{WORKER_PORT}"


@dataclass(frozen=True)
class WorkerConfig(Options):
    """Where a worker waits, what it may load, and how long it waits."""

    listen: str = option(LISTEN, "", "Where to wait for hosts; the next port is used too.", metavar="ADDRESS")
    models: str = option(".", "", "Folder that has the models, each by its name.", metavar="FOLDER")
    token_file: str | None = shared.token_file()
    device: str = shared.device()
    deadline: float = seconds(60.0, "Without any data in a call, after which the other machine is lost.")
    comfy: str | None = option(
        None, "", "Folder with ComfyUI, whose models this worker then loads too.", metavar="FOLDER"
    )
    idle: float = seconds(900.0, "Without a call, after which a host is let go.")

    def validate(self) -> None:
        text = f"--models {self.models} is no folder; give the one that has the models"
        require(Path(self.models).is_dir(), InputError, text)


@with_config(WorkerConfig)
def worker(given: dict[str, Any]) -> None:
    """Wait for a host that makes pictures or video, and compute with it. Runs until Ctrl-C.

    The host runs the script, by thinwire.over_workers or the node for ComfyUI. It says which model below
    --models this worker loads; that stays loaded until another is asked for. One host at a time.

    [bold]Examples[/bold]

    thinwire worker --models models/ --token-file secret

    thinwire worker --listen 127.0.0.1:29600 --models models/
    """
    config = WorkerConfig.from_dict(given)
    place = Address.parse(config.listen, "--listen", like=WORKER_PORT, port=WORKER_PORT)
    token = read_token(config.token_file)
    check_host(place.host, token)
    with suppress(KeyboardInterrupt), stopped_by_signals():  # how it is meant to end
        # After the checks: it needs torch.
        from thinwire.links.hub.hub import Hub
        from thinwire.runs.machine.devices import choose
        from thinwire.uses.pictures.comfy_names.comfy_loading import ComfyLoader
        from thinwire.uses.pictures.comfy_names.comfy_models import COMFY
        from thinwire.uses.pictures.workers.worker_models import KeptModel
        from thinwire.uses.pictures.workers.worker_session import WorkerWaits, wait_for_hosts

        loaders = {} if config.comfy is None else {COMFY: ComfyLoader(Path(config.comfy))}
        kept = KeptModel(Path(config.models), choose(config.device), loaders)
        hub = Hub.bind(place.host, place.port, token=token)
        known = ", ".join(reached_at(place.host))
        tell(f"worker waits at port {hub.port} of {known}, with models of {config.models}")
        waiting = WorkerWaits(place.host, token, config.deadline, config.idle)
        wait_for_hosts(hub, kept, waiting, lambda text: tell(printable(text)))
