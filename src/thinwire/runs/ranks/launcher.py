"""Where a run's ranks live: on this machine, or on emulated machines with a network between them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from thinwire.links.profile import profiles
from thinwire.links.shape import LinkShape
from thinwire.links.tcp import congestion
from thinwire.runs.emulator import shaping_control
from thinwire.runs.ranks.rank_main import CONFIG
from thinwire.runs.ranks.run_config import RunConfig
from thinwire.runs.records.run_record import EMULATED, INVALID, KERNEL, LinkInfo, RunRecord
from thinwire.runs.records.writer import RUN, load_run, write_json
from thinwire.types import MeasurementError

if TYPE_CHECKING:
    import torch.distributed as dist

CUBIC = "cubic"  # the congestion control of emulated links unless told: what most machines have
OPENING = 60.0  # seconds that this process has to reach its own store; --deadline is for waits on others
Rank = subprocess.Popen[str]


class Launcher(ExitStack):
    """Starts the ranks of one run, in which any program runs."""

    def start(
        self,
        config: RunConfig,
        rank: int,
        program: str,
        stderr: IO[bytes] | None = None,
        handed: Mapping[str, int] | None = None,
    ) -> Rank:
        """Start one rank: ``worker.py`` with ``program``, ``MODULE:FUNCTION``.

        ``handed``: descriptors of this process that the rank has too, by the environment variable that says
        their number. A socket among them stays in this process's network, also where the rank has its own.
        """
        raise NotImplementedError

    def require_alive(self) -> None:
        """Raise ``MeasurementError`` if the network between the ranks is gone."""

    def describe(self) -> dict[str, Any]:
        """Return what the emulated network was and how it kept time; nothing without one."""
        return {}

    def book(self, *folders: Path) -> None:
        """Complete the records of a run that has ended; ``MeasurementError`` if it measured nothing valid."""


def launcher_of(config: RunConfig, check: bool = True) -> Launcher:
    """Return where the ranks of ``config`` are to live; ``check`` as of ``EmulatedLauncher``."""
    return EmulatedLauncher(config, check) if config.emulate else LocalLauncher()


def link_of(config: RunConfig) -> LinkInfo:
    """Return what a record says of the link that ``config`` asks for, before anything is measured."""
    if config.emulate:
        first, *others = profiles(config.link.split(";"), config.ranks)
        alike = all(p == first for p in others) and first.up == first.down
        known = (first.up, first.delay) if alike else (None, None)
        return LinkInfo(config.link, *known, emulation=KERNEL)
    shape = LinkShape.parse(config.link)
    emulation = "none" if shape.is_none else EMULATED
    return LinkInfo(config.link, shape.rate, shape.delay or None, emulation=emulation)


class LocalLauncher(Launcher):
    """This machine: loopback, with a store of the launcher's for the ranks to meet at."""

    def __init__(self) -> None:
        super().__init__()
        self._store = _loopback_store()

    def start(
        self,
        config: RunConfig,
        rank: int,
        program: str,
        stderr: IO[bytes] | None = None,
        handed: Mapping[str, int] | None = None,
    ) -> Rank:
        rendezvous = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        environment = _environment(config, rank, config.to_dict(), rendezvous)
        return subprocess.Popen(_command(config, program), **_options(environment, stderr, handed))


class EmulatedLauncher(Launcher):
    """A network namespace a rank, and between them links of ``config``'s shape under the kernel's TCP.

    ``check``: measure them first, and refuse what is not as asked.
    """

    def __init__(self, config: RunConfig, check: bool = True) -> None:
        from thinwire.runs.emulator.session import Emulation

        super().__init__()
        shapes = profiles(config.link.split(";"), config.ranks)
        machines = {congestion.AUTO: CUBIC, congestion.SYSTEM: congestion.system() or CUBIC}
        control = machines.get(config.congestion, config.congestion)
        self._net, self._check = Emulation(shapes, control, config.seed), check

    def __enter__(self) -> Self:
        with ExitStack() as opening:  # which a check that fails closes again: nobody else would
            opening.enter_context(self._net)
            if self._check:
                self._net.check()
            self.enter_context(opening.pop_all())
        return self

    def start(
        self,
        config: RunConfig,
        rank: int,
        program: str,
        stderr: IO[bytes] | None = None,
        handed: Mapping[str, int] | None = None,
    ) -> Rank:
        more = self._net.environment(rank) | {"GLOO_SOCKET_IFNAME": "lo"}
        more["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch warns that these addresses have no names
        own = config.to_dict() | {"host": self._net.address(rank)}
        options = _options(_environment(config, rank, own, more), stderr, handed)
        return shaping_control.start(self._net, rank, _command(config, program), **options)

    def require_alive(self) -> None:
        self._net.require_alive()

    def describe(self) -> dict[str, Any]:
        return self._net.describe()

    def book(self, *folders: Path) -> None:
        invalid: MeasurementError | None = None
        for out in folders:
            record = load_run(out, RunRecord)
            try:
                record.link.keep_time(self.describe())
                self._net.verdict()
            except MeasurementError as e:
                record.status, invalid = INVALID, e
                record.notes.append(str(e))
            write_json(out / RUN, record.to_dict())
        if invalid is not None:
            raise invalid


def _environment(
    config: RunConfig, rank: int, own: Mapping[str, Any], more: Mapping[str, str]
) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "TORCHELASTIC_USE_AGENT_STORE"}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": config.ranks}
    environment |= {**more, **{k: str(v) for k, v in place.items()}}
    # However many machines it plays, this one's cores are shared by all ranks.
    return environment | {"LOCAL_WORLD_SIZE": str(config.ranks), CONFIG: json.dumps(own)}


def _command(config: RunConfig, program: str) -> list[str]:
    options = f"{type(config).__module__}:{type(config).__qualname__}"
    return [sys.executable, "-m", "thinwire.runs.ranks.rank_main", program, options]


def _options(
    environment: dict[str, str], stderr: IO[bytes] | None, handed: Mapping[str, int] | None
) -> dict[str, Any]:
    environment |= {name: str(number) for name, number in (handed or {}).items()}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    if handed:  # Windows cannot
        pipes["pass_fds"] = tuple(handed.values())
    return pipes | {"stderr": stderr, "env": environment, "start_new_session": True}


def _loopback_store() -> dist.TCPStore:
    """Return a store that listens on loopback only; by itself torch's listens on every address."""
    import torch.distributed as dist

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        None,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=OPENING),
        master_listen_fd=listener.detach(),
    )
