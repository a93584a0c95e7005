"""Workers on threads of this process, and a folder with small models for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from waiting import HOST, LONG, two_free_ports

from thinwire.links.hub.hub import Hub
from thinwire.types import LinkError
from thinwire.uses.pictures.workers.worker_models import KeptModel, Loader
from thinwire.uses.pictures.workers.worker_session import WorkerWaits, wait_for_hosts


class ThreadWorker:
    """A worker on a thread of this process."""

    def __init__(
        self,
        models: Path,
        token: bytes | None = None,
        loaders: Mapping[str, Loader] | None = None,
        **waiting: float,
    ) -> None:
        self.kept, self.said = KeptModel(models, torch.device("cpu"), loaders), list[str]()
        self.hub = Hub.bind(HOST, two_free_ports(), token=token)
        self.address = f"{HOST}:{self.hub.port}"
        self._waiting = WorkerWaits(HOST, token, **waiting)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def model(self) -> Any:
        """The model that it has now."""
        return self.kept._model

    def ended(self) -> int:
        """Count the hosts that have ended as they should."""
        return sum(" has ended: " in line for line in self.said)

    def stop(self) -> None:
        self.hub.close()
        self._thread.join(LONG)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(LinkError):
            wait_for_hosts(self.hub, self.kept, self._waiting, self.said.append)


@contextmanager
def crew(models: Path, n: int = 1, **options: Any) -> Iterator[list[ThreadWorker]]:
    made = [ThreadWorker(models, **options) for _ in range(n)]
    try:
        yield made
    finally:
        for worker in made:
            worker.stop()
