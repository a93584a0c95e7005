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
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from thinwire import types
from thinwire.links.profile import Profile, one_way
from thinwire.links.shape import MTU
from thinwire.runs.emulator import namespace_entry
from thinwire.runs.emulator.namespaces import DEVICE, address
from thinwire.runs.emulator.network_check import CheckResult, check_network
from thinwire.runs.emulator.path import Count, LineCounts, RankCounts
from thinwire.runs.emulator.process_cleanup import MARK, mark
from thinwire.runs.emulator.syscalls import INSTEAD
from thinwire.runs.emulator.timing_error import PacketLateness, fault, limit
from thinwire.runs.machine.interrupts import stop
from thinwire.runs.machine.processor import cores
from thinwire.types import InputError, MeasurementError, MissingExtra, ThinwireError, require

RANKS = range(2, 17)
PORT = 29500  # torchrun's default; every emulation has it for itself
START = 60.0  # seconds for the router to come up on a busy machine
ANSWER = 10.0  # seconds for it to answer, or to end


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
    ``MissingExtra`` without pyroute2; ``MeasurementError`` if the router ends before its time.
    """

    def __init__(self, profiles: Sequence[Profile], congestion: str = "cubic", seed: int = 0) -> None:
        check_ranks(len(profiles))
        self.profiles, self.congestion, self.seed = tuple(profiles), congestion, seed
        self._token = os.environ.get("THINWIRE_TOKEN") or secrets.token_hex(16)
        self._router: RouterProcess | None = None
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
        self._router = RouterProcess(
            {
                "profiles": [dataclasses.asdict(p) for p in self.profiles],
                "congestion": self.congestion,
                "seed": self.seed,
                "limit": self.limit,
            }
        )
        self._setup = self._router.setup
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
        router, variables = self._running(), dict(os.environ if env is None else env)
        find_command(argv, variables.get("PATH"))
        net, user = router.namespaces[rank], router.user
        start = [sys.executable, "-I", "-S", str(Path(namespace_entry.__file__).resolve())]
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
        """Raise ``MeasurementError`` if the router has ended, and the network with it."""
        self._running().require_alive()

    def state(self) -> dict[str, Any]:
        """Return counters, lateness and the router's processor use since it last began anew, as JSON values.

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
        if self._router is None:
            return
        try:
            self._last = self._router.ask("stop")
        except ThinwireError as e:  # it ended before its time; whoever asks for its state will be told
            self._lost = e
        self._router.close()
        self._router = None

    def _running(self) -> RouterProcess:
        if self._router is None:
            raise self._lost or ThinwireError("the emulation is not open; use it in a with statement")
        return self._router


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


class RouterProcess:
    """A running router: ``setup`` is what it has built, ``namespaces`` and ``user`` are descriptors of it.

    Errors: ``InputError`` where the system does not allow what ``orders`` ask for; ``MeasurementError``
    if the router ends before its time.
    """

    def __init__(self, orders: dict[str, Any]) -> None:
        self._asking = threading.Lock()
        self._lost: ThinwireError | None = None  # why it is not to be asked any more
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile("w+") as stdin:  # a file: a long trace would fill a pipe
            json.dump(orders | {"owner": os.getpid()}, stdin)
            stdin.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "thinwire.runs.emulator.isolation", str(theirs.fileno())],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                env=os.environ | {MARK: mark(os.getpid())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C is for the commands; they may need the network to end well
            )
        ranks = len(orders["profiles"])
        try:
            self.setup, held = self._receive(START, ranks + 1)
        except BaseException:
            self.close()
            raise
        self.namespaces, self.user = held[:ranks], (held[ranks:] or [-1])[0]

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """Return the router's answer to a request."""
        return self._exchange(what, 0, more)[0]

    def socket(self, rank: int) -> socket.socket:
        """Return a new TCP socket in a rank's namespace."""
        _, fds = self._exchange("socket", 1, {"rank": rank})
        return socket.socket(fileno=fds[0])

    def require_alive(self) -> None:
        """Raise ``MeasurementError`` if the router has ended, with its last words."""
        if self._process.poll() is not None:
            with self._asking:
                self._receive(ANSWER, 0)

    def close(self) -> None:
        """Let go of the router, which then ends, and with it the network; wait for that."""
        self._control.close()
        try:
            self._process.wait(ANSWER)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for fd in (*getattr(self, "namespaces", ()), getattr(self, "user", -1)):
            if fd >= 0:
                os.close(fd)
        self.namespaces, self.user = [], -1

    def _exchange(self, what: str, fds: int, more: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        with self._asking:  # ranks ask too, on threads of the launcher's
            if self._lost is not None:  # a late answer would be taken for that to the next request
                raise self._lost
            try:
                self._control.send(json.dumps({"ask": what} | more).encode())
            except OSError:  # it is gone, which the next lines report
                pass
            return self._receive(ANSWER, fds)

    def _receive(self, patience: float, fds: int) -> tuple[dict[str, Any], list[int]]:
        try:
            return self._read(patience, fds)
        except ThinwireError as e:
            self._lost = self._lost or e
            raise self._lost from None

    def _read(self, patience: float, fds: int) -> tuple[dict[str, Any], list[int]]:
        self._control.settimeout(patience)
        try:
            message, held, _, _ = socket.recv_fds(self._control, 1 << 20, fds)
        except TimeoutError as e:
            raise MeasurementError(f"the emulator's router gave no answer for {patience:g} s") from e
        except ConnectionError:
            message, held = b"", []
        if not message:
            raise MeasurementError(_gone(self._process.wait(ANSWER)))
        said: dict[str, Any] = json.loads(message)
        if "error" in said:
            raise getattr(types, said["error"], ThinwireError)(said["text"])
        return said, held


def _gone(code: int) -> str:
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"the emulator's router ended {how}, so what was measured is not valid"
