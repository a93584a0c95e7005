"""Age over slow links, and what eight followers cost: the cells of ``costs`` that need the emulator."""

from __future__ import annotations

import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.following.recording import LONG, STEPS
from thinwire.links.profile import Profile
from thinwire.links.shape import MTU, SEGMENT
from thinwire.runs.emulator.session import Emulation
from thinwire.state.patches.patch import FORMAT
from thinwire.types import MeasurementError

DELAY = "30ms"
TRAINED = 3.5  # seconds that a step takes on two cores: the pace of whoever trains there
CONTROLS = ("bbr", "cubic")  # of congestion: what a publisher takes where it may, and what most machines have
KEPT = "cubic-kept"  # cubic on machines that do not let it begin slowly again after a pause
IDLE = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
ALONE = ("bbr", KEPT)  # where no version waits for another
APART = 2.0  # times a version's transfer between two of them, at least
FASTEST = "10x"
MBITS = (10, 100)
# link [Mbit/s], learning rate, steps a version, pace ("trained"; "apart": the same, slower where versions
# would meet; or times what the link carries), seconds, and which controls
AGES = (
    (10, 1e-6, 1, "trained", 45, (*CONTROLS, KEPT)),
    (10, 1e-5, 1, "trained", 45, (*CONTROLS, KEPT)),
    (10, 1e-5, 1, "1x", 45, CONTROLS),
    (10, 1e-5, 1, "10x", 45, CONTROLS),
    (10, 1e-6, 4, "apart", 45, ALONE),
    (10, 1e-6, 16, "apart", 45, ALONE),
    (10, 1e-5, 4, "1x", 60, CONTROLS[1:]),
    (10, 1e-5, 4, "apart", 70, ALONE),
    (10, 1e-5, 16, "apart", 110, ALONE),
    (10, 1e-5, 4, "10x", 20, CONTROLS),
    (10, 5e-5, 1, "10x", 95, CONTROLS),
    (10, 5e-5, 1, "apart", 60, CONTROLS[:1]),
    (10, 5e-5, 4, "apart", 110, CONTROLS[:1]),
    (10, 5e-5, 16, "apart", 200, CONTROLS[:1]),
    (100, 1e-6, 1, "trained", 45, (*CONTROLS, KEPT)),
    (100, 1e-6, 4, "apart", 25, ALONE),
    (100, 1e-6, 16, "apart", 25, ALONE),
    (100, 1e-5, 1, "10x", 45, CONTROLS),
    (100, 1e-5, 1, "apart", 25, ALONE),
    (100, 1e-5, 4, "apart", 25, ALONE),
    (100, 1e-5, 16, "apart", 25, ALONE),
    (100, 5e-5, 1, "trained", 45, CONTROLS),
    (100, 5e-5, 1, "1x", 45, CONTROLS),
    (100, 5e-5, 1, "10x", 45, CONTROLS),
    (100, 5e-5, 4, "apart", 25, CONTROLS[:1]),
    (100, 5e-5, 16, "apart", 40, CONTROLS[:1]),
)
FEEDS = ("one", "relay", "direct")  # one follower, eight behind a relay, eight without
MANY = 8
FEED_LINK, FEED_RATE, FEED_INTERVAL, FEED_SECONDS = "200mbit,5ms", 1e-6, 2.0, 30.0
LIMIT = 600.0  # seconds that a cell may take
ATTEMPTS = 2  # at a cell in which the machine was late


def carries(mbit: float) -> float:
    """Return the bytes/s that headers leave of a link."""
    return mbit * 125e3 * SEGMENT / MTU


def interval(pace: str, nbytes: float, mbit: float) -> float:
    """Return the seconds between two versions of ``nbytes`` each at a pace."""
    transfer = nbytes / carries(mbit)
    paces = {"trained": TRAINED, "apart": max(TRAINED, APART * transfer)}
    return paces[pace] if pace in paces else transfer / float(pace.removesuffix("x"))


def steps(words: Iterable[str]) -> int:
    """Return a cell's recorded steps by its words: more at the fastest pace, which takes each once."""
    return LONG if FASTEST in words else STEPS


@dataclass(frozen=True)
class Cell:
    """A publisher on rank 0 and followers on rank 1 of an emulated network: processes of ``module``."""

    link: str
    place: Path
    orders: dict[str, Any]
    control: str
    module: str = "bench.following.worker"

    def run(self) -> dict[str, Any]:
        """Measure, again where the machine was late; what is late to the end is kept as invalid."""
        for left in reversed(range(ATTEMPTS)):
            try:
                found = self._once()
                if found["network"]["valid"] or not left:
                    return found
            except MeasurementError as e:
                if not left:
                    raise
                print(e, file=sys.stderr, flush=True)
        raise MeasurementError("no attempt was made")

    def _once(self) -> dict[str, Any]:
        ready, done = self.place / "ready", self.place / "done"
        for sign in (ready, done):
            sign.unlink(missing_ok=True)
        token = secrets.token_hex(16)
        control, kept = CONTROLS[1] if self.control == KEPT else self.control, self.control == KEPT
        with Emulation([Profile.parse(self.link)] * 2, control) as net:
            net.check()
            for rank in range(2) if kept else ():
                _keep_windows(net, rank)
            common = self.orders | {"host": net.address(0), "token": token, "ready": str(ready),
                                     "done": str(done)}  # fmt: skip
            ranks = []
            for rank, kind in enumerate(("publish", "follow")):
                out = self.place / f"{kind}.json"
                env = os.environ | {"THINWIRE_BENCH": json.dumps(common | {"out": str(out)})}
                ranks.append(net.popen(rank, [sys.executable, "-m", self.module, kind], env))
            end, first = time.monotonic() + LIMIT, None
            while any(p.poll() is None for p in ranks) and time.monotonic() < end:
                if first is None and ready.exists():
                    first = _uplink(net)
                    net.restart()  # counters and lateness from here on
                time.sleep(0.1)
                if any(p.poll() for p in ranks):
                    break
            codes = [p.poll() for p in ranks]
            if any(codes) or None in codes:
                raise MeasurementError(f"publisher and followers ended with {codes}")
            about = net.describe() | {"first_uplink_bytes": first, "uplink_bytes": _uplink(net)}
        said = {k: json.loads((self.place / f"{k}.json").read_text()) for k in ("publish", "follow")}
        keep = ("profiles", "congestion", "valid", "lateness", "lateness_limit", "cpu_share", "load",
                "first_uplink_bytes", "uplink_bytes")  # fmt: skip
        return {"network": {k: about[k] for k in keep}, **said}


def _keep_windows(net: Emulation, rank: int) -> None:
    """Let TCP's window outlast pauses on a rank; ``MeasurementError`` where that is not allowed."""
    set_it = f"from pathlib import Path; Path({IDLE!r}).write_text('0')"
    if net.popen(rank, [sys.executable, "-c", set_it]).wait():
        raise MeasurementError(f"{IDLE} cannot be set in a namespace here")


def _uplink(net: Emulation) -> int:
    return net.counters()[0].up.passed.nbytes


def age(
    folder: Path, mbit: int, rate: float, stride: int, pace: str, seconds: float, control: str, nbytes: float
) -> Any:
    """Return a cell: a recorded run published at a pace over a link; a version has about ``nbytes``."""
    every = interval(pace, nbytes, mbit)
    orders = {"folder": str(folder), "rate": rate, "steps": steps([pace]), "stride": stride,
              "interval": every, "once": pace == FASTEST, "seconds": seconds,
              "followers": 1, "count": 1, "relay": False, "base": True}  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        found = Cell(f"{mbit}mbit,{DELAY}", Path(place), orders, control).run()
    rows = ages(found, carries(mbit), 2 * float(DELAY.removesuffix("ms")) * 1e-3)
    about = {"mbit": mbit, "rate": rate, "stride": stride, "pace": pace, "control": control, "format": FORMAT}
    return {**about, "interval": every, "rows": rows,
            "summary": summary(found, rows, nbytes / carries(mbit)), **found}  # fmt: skip


def ages(found: dict[str, Any], rate: float, trip: float) -> list[dict[str, float]]:
    """Return one row a version that came: its age, and what it is made of, in seconds.

    ``transfer`` is its patch's bytes over what headers leave of the link; ``encode`` the time to find what
    changed and to make the patch, ``apply`` that from the patch's last byte to the words in place. Ages end
    there, so the first bound, which is one on the age at arrival, has ``apply`` on top.
    """
    published = {v["version"]: v for v in found["publish"]["versions"]}
    made = {p["version"]: p["seconds"] for p in found["publish"]["patches"]}
    rows = []
    for a in found["follow"]["followers"][0]["arrivals"]:
        transfer = a["nbytes"] / rate
        encode = published[a["version"]]["seconds"] + made.get(a["version"], 0.0)
        apply = a["apply"] or 0.0
        rows.append({"version": a["version"], "at": a["at"], "age": a["age"], "bytes": a["nbytes"],
                     "transfer": transfer, "took": a["seconds"], "encode": encode,
                     "apply": apply,
                     "of_first_bound": a["age"] / (transfer + trip + encode + apply),
                     "of_second_bound": a["age"] / (2 * transfer + trip)})  # fmt: skip
    return rows


def summary(found: dict[str, Any], rows: list[dict[str, float]], one: float) -> dict[str, Any]:
    """Return a cell in a line; ``one``: the seconds of line that a version takes if it is sent by itself.

    Errors: ``MeasurementError`` unless two versions were published after the first, and one arrived.
    """
    versions, published = found["publish"]["versions"], [r["age"] for r in rows]
    times = [v["published"] for v in versions[1:]]
    if len(times) < 2 or times[-1] <= times[0] or not rows:
        raise MeasurementError(f"{len(times)} versions after the first and {len(rows)} arrivals; take longer")
    between = (times[-1] - times[0]) / (len(times) - 1)
    return {
        "published": len(versions) - 1,
        "arrived": len(rows),
        "published_every": between,
        "times_the_link": one / between,
        "bytes": statistics.median(r["bytes"] for r in rows),
        "transfer": statistics.median(r["transfer"] for r in rows),
        "encode": statistics.median(r["encode"] for r in rows),
        "apply": statistics.median(r["apply"] for r in rows),
        "age": {"median": statistics.median(published), "worst": max(published)},
        "within_first": sum(r["of_first_bound"] <= 1 for r in rows) / len(rows),
        "worst_of_first": max(r["of_first_bound"] for r in rows),
        "within_second": sum(r["of_second_bound"] <= 1 for r in rows) / len(rows),
        "worst_of_second": max(r["of_second_bound"] for r in rows),
        "in_order": all(a["version"] < b["version"] for a, b in pairwise(rows)),
        "pause": max(found["follow"]["followers"][0]["pauses"], default=0.0),
    }


def feed(folder: Path, kind: str) -> dict[str, Any]:
    """Return a cell: what leaves the publisher for one follower, or for eight, behind a relay or not.

    Whoever the publisher talks to has no base, so that all three begin with keyframes; followers of the relay
    have it.
    """
    many = 1 if kind == "one" else MANY
    orders = {"folder": str(folder), "rate": FEED_RATE, "steps": STEPS, "stride": 1, "once": False,
              "interval": FEED_INTERVAL, "seconds": FEED_SECONDS,
              "followers": MANY if kind == "direct" else 1, "count": many,
              "relay": kind == "relay", "base": kind == "relay"}  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        found = Cell(FEED_LINK, Path(place), orders, CONTROLS[1]).run()
    followers = found["follow"]["followers"]
    return {
        "kind": kind,
        "followers": many,
        "network": found["network"],
        "sent_first": found["publish"]["sent_first"],
        "sent_versions": found["publish"]["sent"] - found["publish"]["sent_first"],
        "uplink_bytes": found["network"]["uplink_bytes"],
        "versions": len(found["publish"]["versions"]) - 1,
        "arrived": [len(f["arrivals"]) for f in followers],
        "identical": identical(found),
    }


def identical(found: dict[str, Any]) -> bool:
    """Return whether all followers ended with what was published last."""
    return {f["hash"] for f in found["follow"]["followers"]} == {found["publish"]["hash"]}
