"""The state demo: one process trains and publishes, two follow over slow links, one late, one cut off.

All processes start from the same base, which nobody sends: publisher and followers know it by its hash.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from thinwire.lab.emulator.session import Emulation
from thinwire.lab.following.record import Log, Record
from thinwire.lab.following.talk import ORDER
from thinwire.lab.machine.processor import cores
from thinwire.lab.models.source import resolve_model
from thinwire.links.profile import Profile
from thinwire.replacing import replacing
from thinwire.types import InputError, LinkError, MissingExtra, ThinwireError, require

READY = 180.0  # seconds that a process may take to load
SILENCE = 240.0  # seconds without a word from anybody
GRACE = 10.0  # seconds to leave once asked to
TURN = 0.25
TRAINER, WRITER, LATE = "trainer", "writer", "late"
ROLES = {WRITER: "generates text; cut off for a while", LATE: "joins late"}
Show = Callable[[Record], None]


@dataclass(frozen=True)
class Plan:
    """What is trained, and when what happens: ``join``, ``cut`` and ``restore`` are shares of all steps."""

    model: str = "smollm2-135m"
    data: str = "shakespeare"
    link: str = "10mbit,30ms"
    rates: tuple[float, ...] = (1e-6, 1e-5)
    steps: int = 24  # at each rate
    batch: int = 4
    seq: int = 128
    seed: int = 0
    join: float = 0.3
    cut: float = 0.6
    restore: float = 0.8
    prompt: str = "ROMEO:\nIf I could follow you from far away,"
    tokens: int = 24
    every: float = 20.0  # seconds between two texts
    emulate: bool = True

    def __post_init__(self) -> None:
        require(self.steps > 0, InputError, f"--steps is {self.steps}; it must be 1 or more")
        Profile.parse(self.link)

    @property
    def total(self) -> int:
        return self.steps * len(self.rates)


class Network(Protocol):
    """Where the processes run: an emulation, or this machine as it is."""

    def address(self, rank: int) -> str:
        """Return a rank's address."""
        ...

    def popen(
        self, rank: int, argv: list[str], env: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command for a rank."""
        ...


class _Here:
    """This machine's loopback."""

    def address(self, rank: int) -> str:
        return "127.0.0.1"

    def popen(
        self, rank: int, argv: list[str], env: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, env=dict(env), **options)


class Process:
    """A worker; what it says goes to ``heard`` with its name."""

    def __init__(
        self, name: str, net: Network, rank: int, order: Mapping[str, Any], log: Path,
        heard: queue.Queue[tuple[str, dict[str, Any]]],
    ) -> None:  # fmt: skip
        self.name, self._log, self._heard = name, log, heard
        kind = "train" if name == TRAINER else "follow"
        argv = [sys.executable, "-m", "thinwire.lab.following.worker", kind]
        env = os.environ | {ORDER: json.dumps(order)}
        with log.open("wb") as stderr:
            self._process = net.popen(
                rank, argv, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self._listen, name=f"hears {name}", daemon=True).start()

    def order(self, word: str) -> None:
        """Say one word to it; one that has gone does not hear it."""
        stdin = self._process.stdin
        if stdin is not None:
            with suppress(OSError, ValueError):
                stdin.write(word.encode() + b"\n")
                stdin.flush()

    def require_alive(self) -> None:
        """Raise ``ThinwireError`` with its last words if it has ended."""
        code = self._process.poll()
        if code is not None:
            lines = self._log.read_text("utf-8", "replace").strip().splitlines() or ["it said nothing"]
            raise ThinwireError(f"the {self.name} process ended with {code}: {lines[-1][:300]}")

    def end(self) -> None:
        """Let it leave, or make it."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()  # it ends with its orders
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        stdout = self._process.stdout
        if stdout is None:
            return
        with stdout:
            for line in stdout:
                with suppress(ValueError):
                    self._heard.put((self.name, json.loads(line)))
        self._heard.put((self.name, {"kind": "gone"}))


class Demo:
    """The processes of one demo, for as long as a ``with`` block: then none is left, whatever happened."""

    def __init__(self, plan: Plan, net: Network, record: Record, out: Path, show: Show) -> None:
        self.plan, self.record = plan, record
        self._net, self._out, self._show = net, out, show
        self._heard: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._processes: dict[str, Process] = {}
        self._token = secrets.token_hex(16)
        self._port = 0

    def __enter__(self) -> Demo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        processes, self._processes = list(self._processes.values()), {}
        for process in processes:
            process.order("stop")
        for process in processes:
            process.end()

    def run(self) -> None:
        """Play the whole of it. Errors: ``ThinwireError`` with what a process said before it ended."""
        self._start(TRAINER, 0, {"threads": max(1, cores()), "host": self._net.address(0)})
        said = self._until("listening", TRAINER, READY)
        self._port = said["port"]
        self.record.nbytes, self.record.numel = said["nbytes"], said["numel"]
        self._join(WRITER, 1)
        self._until("following", WRITER, READY)
        self.record.started = time.time()
        self.record.followers[WRITER].joined = 0.0
        self._processes[TRAINER].order("go")
        self._train()
        last = self.record.trained["version"] if self.record.trained else 0
        for name in (WRITER, LATE):
            self._processes[name].order(f"finish {last}")
        for name in (WRITER, LATE):
            if self.record.followers[name].finished is None:
                self._until("finished", name, READY)
        self.record.seconds = self.record.now

    def _train(self) -> None:
        """Hear of every step, and let happen what the plan says."""
        plan, writer = self.plan, self.record.followers[WRITER]
        moments: list[tuple[float, Callable[[], None]]] = [
            (plan.join, lambda: self._join(LATE, 2)),
            (plan.cut, lambda: self._cut(writer)),
            (plan.restore, lambda: self._restore(writer)),
        ]
        while self.record.trained is None:
            self._hear(SILENCE)
            while moments and self.record.steps >= moments[0][0] * plan.total:
                moments.pop(0)[1]()
        for _, missed in moments:
            missed()

    def _cut(self, log: Log) -> None:
        log.cut = [self.record.now]
        self._processes[WRITER].order("cut")

    def _restore(self, log: Log) -> None:
        log.cut.append(self.record.now)
        self._processes[WRITER].order("restore")

    def _join(self, name: str, rank: int) -> None:
        plan = self.plan
        throttled = isinstance(self._net, _Here)
        line = Profile.parse(plan.link)
        order = {
            "host": self._net.address(0),
            "port": self._port,
            "rate": line.down if throttled else None,
            "delay": (line.delay or 0.0) if throttled else 0.0,
            "prompt": plan.prompt if name == WRITER else "",
            "tokens": plan.tokens,
            "every": plan.every,
        }
        self.record.followers[name].joined = self.record.now
        self._start(name, rank, order)

    def _start(self, name: str, rank: int, order: Mapping[str, Any]) -> None:
        log = self._out / f"{name}.log"
        whole = asdict(self.plan) | {"token": self._token} | dict(order)
        self._processes[name] = Process(name, self._net, rank, whole, log, self._heard)

    def _until(self, kind: str, who: str, timeout: float) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            name, message = self._hear(end - time.monotonic())
            if (name, message["kind"]) == (who, kind):
                return message
        raise LinkError(f"the {who} process did not get to {kind!r} within {timeout:g} s; see {who}.log")

    def _hear(self, timeout: float) -> tuple[str, dict[str, Any]]:
        """Wait for the next thing that anybody says, and note it."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            self._show(self.record)
            try:
                name, message = self._heard.get(timeout=TURN)
            except queue.Empty:
                continue
            if message["kind"] == "error":
                error = ThinwireError(f"the {name} process: {message['text']}")
                error.exit_code = message["code"]
                raise error
            if message["kind"] == "gone":
                self._processes[name].end()
                self._processes[name].require_alive()
            self.record.hear(name, message)
            return name, message
        raise LinkError(f"no process said anything for {timeout:g} s; start the demo again")


def run(plan: Plan, out: Path, show: Show) -> Record:
    """Play the demo, calling ``show`` several times a second, and return its record, also in ``out``.

    Errors: ``InputError`` for a model or link that cannot be; ``ThinwireError`` with what a process said.
    """
    resolve_model(plan.model, None)  # made or refused before anything is started
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        net, about = _network(plan, stack)
        record = Record(asdict(plan), about, {name: Log(role) for name, role in ROLES.items()})
        with Demo(plan, net, record, out, show) as demo:
            demo.run()
        if isinstance(net, Emulation):
            about |= _kept_time(net)
    with replacing(out / "state.json") as temporary:
        temporary.write_text(json.dumps(record.to_dict(), indent=1), "utf-8")
    return record


def _network(plan: Plan, stack: ExitStack) -> tuple[Network, dict[str, Any]]:
    """Return an emulated network where one can be had, else this machine's loopback, and what it is."""
    reason = "it was not asked for"
    if plan.emulate:
        try:
            net = stack.enter_context(Emulation([Profile.parse(plan.link)] * 3))
            return net, {"kind": "emulated", "link": plan.link, "note": ""}
        except (InputError, MissingExtra) as e:
            reason = str(e)
    line = Profile.parse(plan.link)
    simple = not line.jitter and not line.loss and line.trace is None and line.up == line.down
    require(simple, InputError, f"without emulation a link has one rate and a delay, not {plan.link}")
    return _Here(), {"kind": "throttled", "link": plan.link, "note": reason}


def _kept_time(net: Emulation) -> dict[str, Any]:
    state = net.describe()
    return {k: state[k] for k in ("valid", "lateness", "lateness_limit", "cpu_share", "load")}
