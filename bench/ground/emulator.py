"""Does the emulated network do what it says? Rates by iperf3 and round trips by ping, both inside it.

Run ``python -m bench.ground.emulator`` (``make bench-emulator``); about ten minutes. Every cell is one rate,
one delay and one congestion control; finished cells are kept, so it goes on where it was stopped. A cell that
the machine was too busy for is measured again, at most ``TRIES`` times, and then kept as invalid, without
what iperf3 and ping found: that is no result. A cell outside the limits is measured anew the next time, and
keeps the valid rates that were found before (``earlier``). The reference is what headers leave: 1448 of 1500
bytes. Results: ``bench/results/emulator.json``. Needs iperf3 and ping.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

from bench.study.cells import RESULTS
from bench.study.tables import Draw, Row, Rows, percent
from bench.study.tables import table as markdown
from thinwire.links.profile import Profile
from thinwire.links.shape import MTU, SEGMENT
from thinwire.runs.emulator.network_check import DELAY_LIMIT, RATE_LIMIT
from thinwire.runs.emulator.session import Emulation
from thinwire.runs.machine.processor import cores, cpu_model
from thinwire.runs.records.writer import read_json, write_json
from thinwire.types import LinkError, MeasurementError

RESULT = RESULTS / "emulator.json"
MBITS, DELAYS, CONGESTION = (10, 100, 500, 1000), (5, 50, 150), ("cubic", "bbr")
SECONDS = 9
TRIES = 3
KEPT = ("scheduling", "lateness", "lateness_limit", "cpu_share", "load", "valid")  # of the emulation
STREAMS = 4  # the link's rate is in question, not how long one connection takes to find it


def round_trip(net: Emulation, count: int = 10) -> float:
    """Return the smallest round trip [s] that ping finds from rank 0 to rank 1."""
    command = ["ping", "-n", "-q", "-c", str(count), "-i", "0.1", net.address(1)]
    said = net.popen(0, command, stdout=subprocess.PIPE, text=True).communicate(timeout=60)[0]
    found = re.search(r"min/avg/max/mdev = ([\d.]+)/", said)
    if found is None:
        raise LinkError(f"ping between emulated ranks: {said.strip()[-200:]}")
    return float(found[1]) * 1e-3


def goodput(net: Emulation, seconds: int = SECONDS, warm_up: int = 2) -> dict[str, Any]:
    """Return what iperf3's receiver on rank 1 gets from rank 0 after ``warm_up`` [s]; rates in bytes/s.

    ``rate`` is the median second's. The mean is TCP's more than the link's: bbr lets the line run empty for
    half a second and a round trip every ten seconds, and what waits behind a lost segment arrives at once.
    """
    deadline = seconds + warm_up + 60
    server = net.popen(1, ["iperf3", "-s", "-1", "-J"], stdout=subprocess.PIPE)
    command = ["iperf3", "-c", net.address(1), "-J", "-P", str(STREAMS)]
    command += ["-t", str(seconds), "-O", str(warm_up)]
    for _ in range(20):  # until the server listens
        client = net.popen(0, command, stdout=subprocess.PIPE)
        said = json.loads(client.communicate(timeout=deadline)[0])
        if "unable to connect" not in said.get("error", ""):
            break
        time.sleep(0.2)
    got = json.loads(server.communicate(timeout=deadline)[0])
    if "error" in said or "error" in got:
        raise LinkError(f"iperf3 between emulated ranks: {said.get('error') or got['error']}")
    each = [i["sum"] for i in got["intervals"]]
    rates = [s["bits_per_second"] / 8 for s in each if not s["omitted"] and s["seconds"] > 0.9]
    senders = [stream["sender"] for stream in said["end"]["streams"]]
    return {
        "rate": statistics.median(rates),
        "mean_rate": said["end"]["sum_received"]["bits_per_second"] / 8,
        "seconds": rates,
        "loaded_trip": statistics.mean(s["mean_rtt"] for s in senders) * 1e-6,
        "retransmits": sum(s["retransmits"] for s in senders),
        "congestion": said["end"]["sender_tcp_congestion"],
    }


def warm_up(mbit: float, delay_ms: float) -> int:
    """Return the seconds that TCP may take to fill the line: slow start, overshoot, cubic's growth."""
    return 2 + int(0.05 * delay_ms * (1 + mbit / 500))


def cell(mbit: int, delay_ms: int, congestion: str) -> dict[str, Any]:
    """Measure one cell, again where the machine was late."""
    profile = Profile.parse(f"{mbit}mbit,{delay_ms}ms")
    for attempt in range(1, TRIES + 1):
        with Emulation([profile] * 2, congestion) as net:
            found: dict[str, Any] = {"trip": round_trip(net)}
            found |= goodput(net, warm_up=warm_up(mbit, delay_ms))
        about = net.describe()
        found |= {"attempt": attempt, **{name: about[name] for name in KEPT}}
        if about["valid"]:
            break
    return judged(found, mbit, delay_ms, congestion)


def judged(found: dict[str, Any], mbit: int, delay_ms: int, congestion: str) -> dict[str, Any]:
    """Return a cell with its verdict; where the machine was late, without what is no result."""
    asked = mbit * 125e3 * SEGMENT / MTU
    if not found["valid"]:
        kept = {name: found[name] for name in (*KEPT, "attempt")}
        return kept | {"rate_asked": asked, "within": False}
    off, trip = found["rate"] / asked - 1, found["trip"] - 2 * delay_ms * 1e-3
    within = abs(off) <= RATE_LIMIT and abs(trip) <= DELAY_LIMIT and found["congestion"] == congestion
    return found | {"rate_asked": asked, "rate_off": off, "trip_off": trip, "within": within}


def improved(before: dict[str, Any] | None, mbit: int, delay: int, congestion: str) -> dict[str, Any]:
    """Return a cell as it was if it was within the limits, else measured again, with earlier valid rates."""
    if before and before["within"] and before["valid"]:
        return before
    earlier = [*before["earlier"], *([before["rate"]] if before["valid"] else [])] if before else []
    return cell(mbit, delay, congestion) | {"earlier": earlier}


def table(found: Row) -> str:
    """Return what iperf3 and ping find across emulated links, by congestion control."""
    cells: dict[str, Any] = found["cells"]

    def rows() -> Rows:
        for name in dict.fromkeys(n.rpartition(",")[0] for n in cells):
            both = [cells.get(f"{name},{congestion}") for congestion in CONGESTION]
            link = name.replace("mbit", " Mbit/s").replace("ms", " ms").replace(",", ", ")
            asked = f"{next(c['rate_asked'] for c in both if c) / 125e3:.2f}"
            yield [link, asked, *(text for c in both for text in _measured(c))]

    each = ("Mbit/s (off by)", "ping, ms", "late, ms")
    heads = [f"{congestion}: {what}" for congestion in CONGESTION for what in each]
    shares = [c["cpu_share"] for c in cells.values() if c["valid"]]
    note = f"The relay took {100 * min(shares):.0f} to {100 * max(shares):.0f} % of a core in these cells"
    if (links := RESULTS / "links.json").exists() and (relay := read_json(links)["relay_share"]):
        least, most = map(percent, relay)
        note += f", and between {least} and {most} in those of [the study of links](links.md)"
    return f"{markdown(['link, one way', 'headers leave', *heads], rows())}\n\n{note}."


def _measured(c: dict[str, Any] | None) -> list[str]:
    if c is None or not c["valid"]:
        return ["not measured" if c is None else "late, so invalid", "", ""]
    off = [c["rate_off"], *(rate / c["rate_asked"] - 1 for rate in c["earlier"])]
    told = "; before: ".join(f"{100 * x:+.2f} %" for x in off)
    return [
        f"{c['rate'] / 125e3:.2f} ({told})",
        f"{c['trip'] * 1e3:.2f}",
        f"{c['lateness']['mean'] * 1e3:.2f}",
    ]


TABLES: dict[str, Draw] = {"emulator": table}


def main() -> None:
    """Measure what is missing, and print it."""
    for program in ("iperf3", "ping"):
        if shutil.which(program) is None:
            raise SystemExit(f"bench.ground.emulator needs {program}; install it from your distribution")
    cells: dict[str, Any] = read_json(RESULT)["cells"] if RESULT.exists() else {}
    machine = {"cpu": cpu_model(), "cores": cores(), "kernel": platform.release()}
    for congestion in CONGESTION:
        for mbit in MBITS:
            for delay in DELAYS:
                name = f"{mbit}mbit,{delay}ms,{congestion}"
                try:
                    cells[name] = improved(cells.get(name), mbit, delay, congestion)
                except MeasurementError as e:  # the relay was killed: measure it next time
                    print(f"{name}: {e}", file=sys.stderr)
                    continue
                write_json(RESULT, {"machine": machine, "cells": cells})
                print(name, *_measured(cells[name]), flush=True)


if __name__ == "__main__":
    main()
