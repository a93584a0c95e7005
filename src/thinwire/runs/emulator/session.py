"""An emulated network for as long as a block lasts: start it, run commands in it, ask how it went.

>>> from thinwire.links.profile import Profile
>>> with Emulation([Profile.parse("100mbit,5ms")] * 2) as net:  # doctest: +SKIP
...     check = net.check()
...     ranks = [net.popen(r, ["hostname", "-I"], env=net.environment(r)) for r in range(2)]
...     codes = [p.wait() for p in ranks]
>>> net.verdict()  # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from thinwire.links.profile import Profile, one_way
from thinwire.links.shape import MTU
from thinwire.runs.emulator import enter
from thinwire.runs.emulator.check import CheckResult, check_network
from thinwire.runs.emulator.lateness import PacketLateness, fault, limit
from thinwire.runs.emulator.namespaces import DEVICE, address
from thinwire.runs.emulator.orphans import MARK, mark
from thinwire.runs.emulator.path import Count, LineCounts, RankCounts
from thinwire.runs.emulator.relay_process import RelayProcess
from thinwire.runs.emulator.syscalls import INSTEAD
from thinwire.runs.machine.processes import stop
from thinwire.runs.machine.processor import cores
from thinwire.types import InputError, MeasurementError, MissingExtra, ThinwireError, require

RANKS = range(2, 17)
PORT = 29500  # torchrun's default; every emulation has it for itself


def check_ranks(ranks: int) -> None:
    """Raise ``InputError`` for a number of ranks that no emulation has."""
    require(
        ranks in RANKS,
        InputError,
        f"an emulation of {ranks} ranks is not possible; choose {RANKS[0]} to {RANKS[-1]}",
    )


class Emulation:
    """A network of ``len(profiles)`` ranks, each in a namespace, from ``with`` to the end of the block.

    Errors: ``InputError`` where the system does not allow it or another emulation is running here;
    ``MissingExtra`` without pyroute2; ``MeasurementError`` if the relay ends before its time.
    """

    def __init__(self, profiles: Sequence[Profile], congestion: str = "cubic", seed: int = 0) -> None:
        check_ranks(len(profiles))
        self.profiles, self.congestion, self.seed = tuple(profiles), congestion, seed
        self._token = os.environ.get("THINWIRE_TOKEN") or secrets.token_hex(16)
        self._relay: RelayProcess | None = None
        self._lost: ThinwireError | None = None
        self._setup: dict[str, Any] = {}
        self._commands: list[subprocess.Popen[Any]] = []
        self._load = 0.0
        self._checked: CheckResult | None = None
        self._last: dict[str, Any] | None = None

    @property
    def limit(self) -> float:
        """The mean lateness [s] above which the run is invalid; the shortest delay of two ranks sets it."""
        pairs = [(a, b) for i, a in enumerate(self.profiles) for b in self.profiles[:i]]
        return limit(min(one_way(a, b) for a, b in pairs))

    def __enter__(self) -> Emulation:
        require_possible()
        self._load = os.getloadavg()[0]
        self._relay = RelayProcess(
            {
                "profiles": [dataclasses.asdict(p) for p in self.profiles],
                "congestion": self.congestion,
                "seed": self.seed,
                "limit": self.limit,
            }
        )
        self._setup = self._relay.setup
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, rank: int) -> str:
        """Return the rank's IPv4 address."""
        return address(rank)

    def environment(self, rank: int) -> dict[str, str]:
        """Return what torchrun would set if every rank were a machine of its own, with one process.

        And what ``connect_mesh`` needs there: the machine's own address, and a token, since links leave it.
        """
        return {
            "THINWIRE_HOST": address(rank),
            "THINWIRE_TOKEN": self._token,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(self.profiles)),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "TP_SOCKET_IFNAME": DEVICE,
        }

    def popen(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command in a rank's namespace; ``options`` are ``subprocess.Popen``'s.

        It has the whole of ``env`` (by default this process's environment) and ends with the thread that
        starts it, or with the block. Errors: ``InputError`` for a command that is not there.
        """
        relay, variables = self._running(), dict(os.environ if env is None else env)
        find_command(argv, variables.get("PATH"))
        net, user = relay.namespaces[rank], relay.user
        start = [sys.executable, "-I", "-S", str(Path(enter.__file__).resolve())]
        start += [str(net), str(user), str(os.getpid())]
        options["pass_fds"] = [*options.get("pass_fds", ()), net, *([user] if user >= 0 else [])]
        process = subprocess.Popen([*start, *argv], env=variables | {MARK: mark(os.getpid())}, **options)
        self._commands.append(process)
        return process

    def socket(self, rank: int) -> socket.socket:
        """Return a new TCP socket in a rank's namespace, for this process to bind or connect."""
        return self._running().socket(rank)

    def restart(self, clean: bool = False) -> float:
        """Begin anew: traces from their first row, empty queues, counters and lateness at zero.

        ``clean``: without loss and jitter, for measurements. Return when, on ``time.monotonic``'s clock.
        """
        start: float = self._running().ask("restart", clean=clean)["start"]
        return start

    def lift(self, by: int) -> None:
        """Count ``by`` more ranks that want no shape for a while: for traffic outside the experiment.

        What passes then is in no counter and no lateness.
        """
        self._running().ask("lift", by=by)

    def rewind(self) -> None:
        """Let traces begin again from their first row; nothing else changes."""
        self._running().ask("rewind")

    def check(self) -> CheckResult:
        """Measure the network with real sockets, then begin anew. Errors: ``MeasurementError``."""
        result = self._checked = check_network(self.profiles, self.socket, self.restart)
        late = self.lateness()
        self.restart()
        try:
            result.verdict(self.congestion)
        except MeasurementError as e:
            if late.mean <= self.limit:
                raise
            busy = f"packets were {late.mean * 1e3:.2f} ms late on average"
            raise MeasurementError(f"{e}; this machine is too busy to keep time: {busy}") from e
        return result

    def require_alive(self) -> None:
        """Raise ``MeasurementError`` if the relay has ended, and the network with it."""
        self._running().require_alive()

    def state(self) -> dict[str, Any]:
        """Return counters, lateness and the relay's processor use since it last began anew, as JSON values.

        After the block: as they were at its end.
        """
        return self._running().ask("state") if self._last is None else self._last

    def counters(self) -> list[RankCounts]:
        """Return what each rank's lines have carried, dropped and lost."""
        return [RankCounts(_line(c["up"]), _line(c["down"])) for c in self.state()["counters"]]

    def lateness(self) -> PacketLateness:
        """Return how late packets were delivered."""
        return PacketLateness(**self.state()["lateness"])

    def verdict(self) -> None:
        """Raise ``MeasurementError`` if the machine was too busy to keep time."""
        found = self._fault(self.state())
        require(
            found is None,
            MeasurementError,
            f"this machine was too busy to keep time: {found}; run it again with less else to do",
        )

    def _fault(self, state: dict[str, Any]) -> str | None:
        dropped = sum(state["device_dropped"])
        return fault(PacketLateness(**state["lateness"]), state["run_queue_wait"], dropped, self.limit)

    def describe(self) -> dict[str, Any]:
        """Return what the network was and how it kept time, as plain JSON values for a run record."""
        state, checked = self.state(), self._checked
        return {
            "profiles": [str(p) for p in self.profiles],
            "seed": self.seed,
            "congestion": {"asked": self.congestion, "found": checked.congestion if checked else None},
            "mtu": MTU,
            "isolation": "user namespace" if self._setup["user_namespace"] else "root",
            "settings": self._setup["settings"][0],
            "scheduling": self._setup["scheduling"],
            "check": dataclasses.asdict(checked) if checked else None,
            "lateness_limit": self.limit,
            "valid": self._fault(state) is None,
            "load": {"before": self._load, "after": os.getloadavg()[0], "cores": cores()},
            "kernel": platform.release(),
            **state,
        }

    def close(self) -> None:
        """End the commands, then the network; what it measured stays readable."""
        stop(self._commands, signal.SIGTERM)
        if self._relay is None:
            return
        try:
            self._last = self._relay.ask("stop")
        except ThinwireError as e:  # it ended before its time; whoever asks for its state will be told
            self._lost = e
        self._relay.close()
        self._relay = None

    def _running(self) -> RelayProcess:
        if self._relay is None:
            raise self._lost or ThinwireError("the emulation is not open; use it in a with statement")
        return self._relay


def require_possible() -> None:
    """Raise ``InputError`` where emulation is not possible for reasons that are known before trying."""
    require(sys.platform == "linux", InputError, f"emulated links need Linux, not {sys.platform}; {INSTEAD}")
    if importlib.util.find_spec("pyroute2") is None:
        raise MissingExtra("emulated links need pyroute2, which is absent; pip install 'thinwire[emulate]'")


def find_command(argv: Sequence[str], path: str | None = None) -> str:
    """Return the program that a command starts. Errors: ``InputError`` if it is not there."""
    found = shutil.which(argv[0], path=path)
    if found is None:
        raise InputError(f"command {argv[0]!r} is not found; check its name and PATH")
    return found


def _line(values: dict[str, dict[str, int]]) -> LineCounts:
    return LineCounts(**{name: Count(**count) for name, count in values.items()})
