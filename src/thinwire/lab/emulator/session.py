"""An emulated network for as long as a block lasts: start it, run commands in it, ask how it went.

>>> from thinwire.lab.emulator.profile import Profile
>>> with Emulation([Profile.parse("100mbit,5ms")] * 2) as net:  # doctest: +SKIP
...     check = net.check()
...     ranks = [net.popen(r, ["hostname", "-I"], env=net.environment(r)) for r in range(2)]
...     codes = [p.wait() for p in ranks]
...     net.verdict()
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from thinwire import types
from thinwire.lab.emulator import enter
from thinwire.lab.emulator.check import CheckResult, check_network
from thinwire.lab.emulator.lateness import Lateness, limit
from thinwire.lab.emulator.namespaces import DEVICE, INSTEAD, MTU, address
from thinwire.lab.emulator.orphans import MARK, mark
from thinwire.lab.emulator.path import Count, LineCounts, RankCounts
from thinwire.lab.emulator.profile import Profile, one_way
from thinwire.lab.machine import cores
from thinwire.types import InputError, MeasurementError, MissingExtra, ThinwireError, require

RANKS = range(2, 17)
PORT = 29500  # torchrun's default; every emulation has it for itself
START = 60.0  # seconds for the relay to come up on a busy machine
ANSWER = 10.0  # seconds for the relay to answer
GRACE = 10.0  # seconds for commands to end by themselves once asked to


class Emulation:
    """A network of ``len(profiles)`` ranks, each in a namespace, from ``with`` to the end of the block.

    Errors: ``InputError`` where the system does not allow it or another emulation is running here;
    ``MissingExtra`` without pyroute2; ``MeasurementError`` if the relay ends before its time.
    """

    def __init__(self, profiles: Sequence[Profile], congestion: str = "cubic", seed: int = 0) -> None:
        require(
            len(profiles) in RANKS,
            InputError,
            f"an emulation of {len(profiles)} ranks is not possible; choose {RANKS[0]} to {RANKS[-1]}",
        )
        self.profiles, self.congestion, self.seed = tuple(profiles), congestion, seed
        self._relay: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._asking = threading.Lock()
        self._held: list[int] = []
        self._ranks: list[subprocess.Popen[Any]] = []
        self._setup: dict[str, Any] = {}
        self._last: dict[str, Any] | None = None
        self._checked: CheckResult | None = None

    @property
    def limit(self) -> float:
        """The mean lateness [s] above which the run is invalid; the shortest delay of two ranks sets it."""
        pairs = [(a, b) for i, a in enumerate(self.profiles) for b in self.profiles[:i]]
        return limit(min(one_way(a, b) for a, b in pairs))

    def __enter__(self) -> Emulation:
        _possible()
        self._load = os.getloadavg()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile("w+") as orders:  # a file: a long trace would fill a pipe
            json.dump(self._orders(), orders)
            orders.seek(0)
            self._relay = subprocess.Popen(
                [sys.executable, "-m", "thinwire.lab.emulator.relay", str(theirs.fileno())],
                stdin=orders,
                stdout=subprocess.DEVNULL,
                env=os.environ | {MARK: mark(os.getpid())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C is for the commands; they may need the network to end well
            )
        self._setup, self._held = self._receive(START, len(self.profiles) + 1)

    def _orders(self) -> dict[str, Any]:
        return {
            "profiles": [dataclasses.asdict(p) for p in self.profiles],
            "congestion": self.congestion,
            "seed": self.seed,
            "limit": self.limit,
            "owner": os.getpid(),
        }

    def _receive(self, patience: float, descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
        control = self._open()
        control.settimeout(patience)
        try:
            message, held, _, _ = socket.recv_fds(control, 1 << 20, descriptors)
        except OSError as e:
            raise MeasurementError(f"the emulator's relay gave no answer for {patience:g} s") from e
        if not message:
            code = self._relay.wait(ANSWER) if self._relay else None
            raise MeasurementError(
                f"the emulator's relay ended ({_ending(code)}), so nothing can be measured"
            )
        said: dict[str, Any] = json.loads(message)
        if "error" in said:
            raise getattr(types, said["error"], ThinwireError)(said["text"])
        return said, held

    def _ask(self, what: str, descriptors: int = 0, **more: Any) -> tuple[dict[str, Any], list[int]]:
        with self._asking:  # ranks ask too, through the launcher's threads
            try:
                self._open().send(json.dumps({"ask": what} | more).encode())
            except OSError:
                pass  # its end is reported by what follows
            return self._receive(ANSWER, descriptors)

    def _open(self) -> socket.socket:
        if self._control is None:
            raise ThinwireError("the emulation is not open; use it in a with statement")
        return self._control

    def address(self, rank: int) -> str:
        """Return the rank's IPv4 address."""
        return address(rank)

    def environment(self, rank: int) -> dict[str, str]:
        """Return what torchrun would set if every rank were a machine of its own, with one process."""
        return {
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
        starts it. Errors: ``InputError`` for a command that is not there.
        """
        variables = dict(os.environ if env is None else env)
        found = shutil.which(argv[0], path=variables.get("PATH"))
        require(found is not None, InputError, f"command {argv[0]!r} is not found; check name and PATH")
        user = self._held[len(self.profiles)] if self._setup["user_namespace"] else -1
        net = self._held[rank]
        fds = [net] + ([user] if user >= 0 else [])
        command = [sys.executable, "-I", "-S", str(Path(enter.__file__).resolve()), str(net), str(user)]
        options["pass_fds"] = [*options.get("pass_fds", ()), *fds]
        process = subprocess.Popen(
            [*command, str(os.getpid()), *argv], env=variables | {MARK: mark(os.getpid())}, **options
        )
        self._ranks.append(process)
        return process

    def socket(self, rank: int) -> socket.socket:
        """Return a new TCP socket in a rank's namespace, for this process to bind or connect."""
        _, fds = self._ask("socket", 1, rank=rank)
        return socket.socket(fileno=fds[0])

    def restart(self, clean: bool = False) -> float:
        """Begin anew: traces from their first row, empty queues, counters and lateness at zero.

        ``clean``: without loss and jitter, for measurements. Return when, on ``time.monotonic``'s clock.
        """
        start: float = self._ask("restart", clean=clean)[0]["start"]
        return start

    def lift(self, by: int) -> None:
        """Count ``by`` more ranks that want no shape for a while: for traffic outside the experiment.

        What passes then is in no counter and no lateness.
        """
        self._ask("lift", by=by)

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

    def state(self) -> dict[str, Any]:
        """Return counters, lateness and the relay's processor use since the start or the check, as JSON."""
        if self._last is None:
            return self._ask("state")[0]
        return self._last

    def counters(self) -> list[RankCounts]:
        """Return what each rank's lines have carried, dropped and lost."""
        return [RankCounts(_line(c["up"]), _line(c["down"])) for c in self.state()["counters"]]

    def lateness(self) -> Lateness:
        """Return how late packets were delivered."""
        return Lateness(**self.state()["lateness"])

    def verdict(self) -> None:
        """Raise ``MeasurementError`` if the machine was too busy to keep time."""
        late = self.lateness()
        require(
            late.mean <= self.limit,
            MeasurementError,
            f"this machine was too busy to keep time: packets were {late.mean * 1e3:.2f} ms late on average, "
            f"above the limit of {self.limit * 1e3:.2f} ms; run it again with less else to do",
        )

    def describe(self) -> dict[str, Any]:
        """Return what the network was and how it kept time, as plain JSON values for a run record."""
        late = self.lateness()
        return {
            "profiles": [str(p) for p in self.profiles],
            "seed": self.seed,
            "congestion": {
                "asked": self.congestion,
                "found": self._checked.congestion if self._checked else None,
            },
            "mtu": MTU,
            "isolation": "user namespace" if self._setup["user_namespace"] else "root",
            "settings": self._setup["settings"][0],
            "scheduling": self._setup["scheduling"],
            "check": dataclasses.asdict(self._checked) if self._checked else None,
            "lateness_limit": self.limit,
            "valid": late.mean <= self.limit,
            "load": {"before": self._load[0], "after": os.getloadavg()[0], "cores": cores()},
            "kernel": platform.release(),
            **self.state(),
        }

    def close(self) -> None:
        """Stop the commands and the network; counters and lateness stay readable."""
        stop(self._ranks)
        if self._control is not None:
            try:
                if self._setup and self._last is None:
                    self._last = self._ask("stop")[0]
            except ThinwireError:
                pass
            self._control.close()
        self._control = None
        for fd in self._held:
            os.close(fd)
        self._held = []
        if self._relay is not None:
            _end(self._relay)


def stop(commands: Sequence[subprocess.Popen[Any]]) -> None:
    """End commands: ask first, kill those that have not left in time."""
    for p in commands:
        if p.poll() is None:
            p.terminate()
    end = time.monotonic() + GRACE
    for p in commands:
        try:
            p.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            p.kill()
            p.wait()


def _end(relay: subprocess.Popen[bytes]) -> None:
    try:
        relay.wait(GRACE)
    except subprocess.TimeoutExpired:
        relay.kill()
        relay.wait()


def _possible() -> None:
    require(sys.platform == "linux", InputError, f"emulated links need Linux, not {sys.platform}; {INSTEAD}")
    if importlib.util.find_spec("pyroute2") is None:
        raise MissingExtra("emulated links need pyroute2, which is absent; pip install 'thinwire[emulate]'")


def _line(values: dict[str, dict[str, int]]) -> LineCounts:
    return LineCounts(**{name: Count(**count) for name, count in values.items()})


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"exit code {code}"
