"""Workers on threads of this process, and a folder with small models for them."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from waiting import LONG

from thinwire.links.hub.hub import Hub
from thinwire.types import LinkError
from thinwire.uses.pictures.workers.worker_models import KeptModel, Loader
from thinwire.uses.pictures.workers.worker_session import WorkerWaits, wait_for_hosts

HOST = "127.0.0.1"


def two_free_ports() -> int:
    """Return a port that is free with the next one, below those that the system gives to anybody."""
    for port in random.sample(range(20000, 32000, 2), 100):
        with suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind((HOST, port))
            two.bind((HOST, port + 1))
            return port
    raise LinkError("no two ports in a row are free")


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
