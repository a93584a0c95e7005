"""The router: a process that holds all ranks' devices and passes packets on when the model says so.

It makes the namespaces itself, so that no other process has to leave its own, and they live only as long as
it does. Its owner talks to it through a socket. It ends when told to, or when its owner is gone, and kills
what is still inside.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import select
import signal
import socket
import time
from typing import Any

from thinwire.links.profile import Profile
from thinwire.links.trace import Trace, TraceRow
from thinwire.runs.emulator import namespaces
from thinwire.runs.emulator.namespaces import RankNamespace
from thinwire.runs.emulator.packets import LARGEST, cut, destination, on_the_wire
from thinwire.runs.emulator.path import SimulatedNetwork
from thinwire.runs.emulator.process_cleanup import sweep
from thinwire.runs.emulator.syscalls import (
    CLONE_NEWNET,
    PR_SET_PDEATHSIG,
    PR_SET_TIMERSLACK,
    Timer,
    prctl,
    setns,
)
from thinwire.runs.emulator.timing_error import LatenessMeter
from thinwire.types import MeasurementError, ThinwireError

BATCH = 32  # packets read from a device before others have their turn
PRIORITY = 50  # of SCHED_FIFO's 1 to 99
NICE = -10


class OwnerGone(Exception):
    """The process that wanted the emulation has ended."""


class PacketRouter:
    """Move packets between the devices of ``ranks`` in the time of ``profiles``."""

    def __init__(self, ranks: list[RankNamespace], profiles: list[Profile], seed: int, limit: float) -> None:
        self._ranks, self._profiles, self._seed, self._limit = ranks, profiles, seed, limit
        self._poll, self._timer, self._armed = select.epoll(), Timer(), 0.0
        self._lifted = 0  # ranks that want no shape now
        self._rank_of = {r.tun: i for i, r in enumerate(ranks)}
        for fd in (self._timer.fileno(), *self._rank_of):
            self._poll.register(fd, select.EPOLLIN)
        self.restart()

    def restart(self, clean: bool = False) -> None:
        """Begin anew: traces from their first row, empty queues, counters at zero; what is under way is lost.

        ``clean``: without loss and jitter, until the next restart.
        """
        profiles = self._profiles
        if clean:
            profiles = [dataclasses.replace(p, loss=0.0, jitter=0.0) for p in profiles]
        self._start = self._rewound = time.monotonic()
        self._cpu, self._waited = time.process_time(), _run_queue()
        self._network = SimulatedNetwork(profiles, self._seed, self._start, cut=cut)
        self._late = LatenessMeter(self._limit)
        self._foreign = self._refused = 0
        self._dropped, self._seen = [0] * len(self._ranks), self._device_drops()

    def run(self, control: socket.socket) -> None:
        """Route until ``control`` says stop. Errors: ``OwnerGone``."""
        self._poll.register(control.fileno(), select.EPOLLIN)
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._rank_of:
                    self._read(fd)
                elif fd == control.fileno():
                    if not self._answer(control):
                        return
                else:
                    self._timer.clear()
                    self._armed = 0.0
            self._deliver()

    def _read(self, fd: int) -> None:
        source, ranks = self._rank_of[fd], len(self._ranks)
        for _ in range(BATCH):
            try:
                packet = os.read(fd, LARGEST)
            except BlockingIOError:
                return
            except OSError as e:
                raise MeasurementError(
                    f"the device {namespaces.DEVICE} of rank {source} is gone ({e.strerror}), so what was "
                    "measured is not valid; let commands leave it as it is"
                ) from e
            target = destination(packet)
            if not 0 <= target < ranks:
                self._foreign += 1
                continue
            nbytes, segments = on_the_wire(packet)
            if self._lifted:
                self._pass(target, packet)
            else:
                self._network.offer(time.monotonic(), source, target, nbytes, segments, packet)

    def _pass(self, rank: int, packet: bytes) -> None:
        try:
            os.write(self._ranks[rank].tun, packet)
        except OSError:  # its command took the device down
            self._refused += 1

    def _lift(self, by: int) -> None:
        """Take the shape off while anyone wants it off; what is under way then arrives at once, in order."""
        self._count_drops()
        self._lifted += by
        if self._lifted:
            for _, rank, packet in self._network.deliver(float("inf")):
                self._pass(rank, packet)

    def _deliver(self) -> None:
        for due, rank, packet in self._network.deliver(time.monotonic()):
            self._pass(rank, packet)
            now = time.monotonic()
            self._late.add(now, now - due)
        due_next = self._network.next()
        if due_next is not None and due_next != self._armed:
            self._timer.set(due_next)
            self._armed = due_next

    def _answer(self, control: socket.socket) -> bool:
        """Answer one request; return whether to go on."""
        request = control.recv(4096)
        if not request:
            raise OwnerGone
        asked = json.loads(request)
        if asked["ask"] == "socket":
            setns(self._ranks[asked["rank"]].net, CLONE_NEWNET)
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as made:
                socket.send_fds(control, [b"{}"], [made.fileno()])
            return True
        if asked["ask"] == "lift":
            self._lift(asked["by"])
        if asked["ask"] == "rewind":
            self._rewound = time.monotonic()
            self._network.rewind(self._rewound)
        if asked["ask"] == "restart":
            self.restart(asked["clean"])
        control.send(json.dumps(self.state()).encode())
        return bool(asked["ask"] != "stop")

    def state(self) -> dict[str, Any]:
        """Return counters, lateness and processor use since the start, as JSON values."""
        self._count_drops()
        wall = time.monotonic() - self._start
        wait, runs = (now - then for now, then in zip(_run_queue(), self._waited, strict=True))
        return {
            "start": self._start,
            "seconds": wall,
            "trace_began": self._rewound - self._start,
            "cpu_share": (time.process_time() - self._cpu) / max(wall, 1e-9),
            "lateness": dataclasses.asdict(self._late.summary()),
            "run_queue_wait": wait / max(runs, 1),
            "counters": [dataclasses.asdict(c) for c in self._network.counts()],
            "not_between_ranks": self._foreign,
            "refused": self._refused,
            "device_dropped": list(self._dropped),
        }

    def _count_drops(self) -> None:
        """Count what the devices had no room for since the last look, unless the shape was off meanwhile."""
        before, self._seen = self._seen, self._device_drops()
        if not self._lifted:
            news = zip(self._dropped, self._seen, before, strict=True)
            self._dropped = [counted + now - then for counted, now, then in news]

    def _device_drops(self) -> list[int]:
        """Return how many packets each rank's device ever had no room for: this process did not read them."""
        return [namespaces.dropped(rank.net) for rank in self._ranks]


def _run_queue() -> tuple[float, int]:
    """Return how long [s] this process was ready but not running, and how often it ran, so far."""
    try:
        with open("/proc/self/schedstat", encoding="ascii") as f:  # noqa: PTH123
            _, waited, runs = f.read().split()
    except (OSError, ValueError):
        return 0.0, 0
    return int(waited) * 1e-9, int(runs)


def _hurry() -> str:
    """Get the best scheduling that this system allows, and return its name."""
    prctl(PR_SET_TIMERSLACK, 1)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))
        return f"SCHED_FIFO {PRIORITY}"
    except OSError:
        pass
    try:
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        return f"nice {NICE}"
    except OSError:
        return f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"


def _profile(values: dict[str, Any]) -> Profile:
    trace = values.pop("trace")
    if trace is not None:
        trace = Trace(tuple(TraceRow(*row) for row in trace["rows"]), trace["period"], trace["name"])
    return Profile(**values, trace=trace)


def _build(orders: dict[str, Any]) -> tuple[list[RankNamespace], list[Profile]]:
    profiles = [_profile(p) for p in orders["profiles"]]
    ranks = []
    for rank, profile in enumerate(profiles):
        segments = namespaces.offload_segments(profile.uplink.mean)
        ranks.append(namespaces.make(rank, orders["congestion"], segments))
    return ranks, profiles


def _announce(control: socket.socket, user: bool, ranks: list[RankNamespace], scheduling: str) -> None:
    said = {"scheduling": scheduling, "user_namespace": user, "settings": [r.settings for r in ranks]}
    held = [r.net for r in ranks]
    if user:
        held.append(os.open("/proc/self/ns/user", os.O_RDONLY))
    socket.send_fds(control, [json.dumps(said).encode()], held)
    if user:
        os.close(held[-1])


def _follow(owner: int, control: socket.socket) -> None:
    """See the end of ``control`` when the owner ends, even where a copy of the owner's side lives on.

    The signal raises nothing: it can come at any point, the last sweep included.
    """

    def left(*_: object) -> None:
        if os.getppid() != owner:  # the signal also comes when only the owner's thread has ended
            control.shutdown(socket.SHUT_RDWR)

    signal.signal(signal.SIGTERM, left)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    left()


def serve(control: socket.socket, orders: dict[str, Any], user: bool) -> None:
    """Build the network that ``orders`` ask for, and router until the end.

    ``user``: this process is in a user namespace of its own. Why it cannot be built is told over ``control``.
    """
    inodes: list[int] = []
    try:
        ranks, profiles = _build(orders)
        inodes = [os.fstat(r.net).st_ino for r in ranks]
        _follow(orders["owner"], control)
        scheduling = _hurry()
        router = PacketRouter(ranks, profiles, orders["seed"], orders["limit"])
        gc.collect()
        gc.freeze()  # the loop makes no cycles, and a collection would make packets late
        gc.disable()
        _announce(control, user, ranks, scheduling)
        router.run(control)
    except ThinwireError as e:
        control.send(json.dumps({"error": type(e).__name__, "text": str(e)}).encode())
    except (OwnerGone, BrokenPipeError):
        pass
    finally:
        sweep(inodes)
