"""What the owner of a measured link can do about it, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.links.tcp.congestion import KEEPING, REMEDY
from thinwire.runs.machine.network import restarts
from thinwire.runs.records.progress import megabytes
from thinwire.uses.doctor.run.linktest import LinkTest, MeasuredWay, TestedMachine

FAR = 0.005  # seconds of round trip below which slow start costs little
LOSSY = 0.01  # share of the bytes sent twice
BLOATED = 0.05  # seconds that a queue may add to the round trip


def advice(test: LinkTest) -> list[str]:
    """Return what would make the link better, most useful first; empty where nothing is seen."""
    found = [*_way(test.here, test.there, test.out, test), *_way(test.there, test.here, test.back, test)]
    return list(dict.fromkeys(found))


def _way(sender: TestedMachine, receiver: TestedMachine, way: MeasuredWay, test: LinkTest) -> Iterator[str]:
    control = way.congestion or sender.settings.get("tcp_congestion_control")
    trip = f"{test.rtt * 1e3:.0f} ms"
    if restarts(control, sender.settings) and test.rtt >= FAR:
        yield (
            f"{sender.name}: {control} starts slowly again after each pause, which costs a message several "
            f"round trips of {trip}; {REMEDY}"
        )
    needed = 2 * way.rate * test.rtt  # kernels count their own overhead in the buffer too
    for machine, setting in ((sender, "tcp_wmem"), (receiver, "tcp_rmem")):
        limit = _largest(machine.settings.get(setting, ""))
        if limit is not None and needed > limit:
            yield (
                f"{machine.name}: {setting} allows {megabytes(limit)}, and this link wants "
                f"{megabytes(2 * needed)}; sysctl -w net.ipv4.{setting}='4096 131072 {int(2 * needed)}'"
            )
    if way.retransmitted is not None and way.retransmitted > LOSSY:
        remedy = "; try bbr" if control is not None and control not in KEEPING else ""
        yield (
            f"from {sender.name}: {way.retransmitted:.1%} of the bytes were sent again; the way loses "
            f"packets or its queue is short{remedy}"
        )
    if way.loaded_rtt is not None and way.loaded_rtt - test.rtt > BLOATED:
        yield (
            f"from {sender.name}: the round trip grows from {trip} to {way.loaded_rtt * 1e3:.0f} ms under "
            "load; a long queue on the way, where other traffic waits too"
        )


def _largest(setting: str) -> int | None:
    last = setting.rpartition(" ")[2]
    return int(last) if last.isdecimal() else None
