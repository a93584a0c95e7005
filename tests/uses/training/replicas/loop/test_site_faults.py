"""Faults of sites that train in a loop of their own: killed, frozen, and cut off. All are real."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from launchers import Command, free_port, warm
from tcp_proxy import TcpProxy

SITE = Path(__file__).parent / "paced_site.py"
NEEDS = ["torch._dynamo", "torch.distributed", "thinwire:local_steps", "thinwire:meet", "zstandard"]
BRIEF, LONG = 2.0, 20.0  # seconds: deadlines
PAUSE = 3.0  # seconds of a cut, or of a freeze that ends
SLACK = 15.0  # seconds that a busy machine may take beside a deadline


class Sites:
    """Processes of sites, which all end with this."""

    def __init__(self, place: Path) -> None:
        self._place, self._started = place, list[Command]()

    def start(self, *arguments: object) -> Command:
        place = self._place / str(len(self._started))
        self._started.append(warm().python(place, SITE, *arguments, needs=NEEDS))
        return self._started[-1]

    def pair(self, deadline: float, route: tuple[object, ...] = ()) -> list[Command]:
        """Start two sites; ``route``: how others reach the first."""
        address = f"127.0.0.1:{free_port()}"
        return [self.start(address, rank, deadline, *(() if rank else route)) for rank in range(2)]

    def close(self) -> None:
        for site in self._started:
            with suppress(ProcessLookupError):
                site.signal(signal.SIGKILL)


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    started = Sites(tmp_path)
    yield started
    started.close()


def weights(pair: list[Command]) -> str:
    """Return the digest that both sites end with."""
    first, second = (site.says(r"weights (\w+)")[1] for site in pair)
    assert first == second
    return first


def test_a_cut_and_a_pause_cost_time_and_nothing_else(sites: Sites) -> None:
    port = free_port()
    with ExitStack() as stack:
        proxy = stack.enter_context(TcpProxy(port))
        whole, cut, frozen = (
            sites.pair(LONG),
            sites.pair(LONG, (port, f"127.0.0.1:{proxy.port}")),
            sites.pair(LONG),
        )
        for pair in (cut, frozen):
            pair[1].says("step 12")
        before = proxy.connections
        proxy.cut()
        frozen[1].signal(signal.SIGSTOP)
        time.sleep(PAUSE)
        said = frozen[0].out.count("step")
        proxy.restore()
        frozen[1].signal(signal.SIGCONT)
        assert weights(cut) == weights(frozen) == weights(whole)
        assert proxy.connections > before and said < 50  # both did stop the others


def test_a_site_that_is_gone_is_named_within_the_deadline(sites: Sites, tmp_path: Path) -> None:
    killed, frozen = sites.pair(BRIEF), sites.pair(BRIEF)
    address = f"127.0.0.1:{free_port()}"
    inside = [sites.start(address, 0, BRIEF, tmp_path / "group", place) for place in range(2)]
    other = sites.start(address, 1, BRIEF)
    for site in (killed[1], frozen[1], other):
        site.says("step 12")
    killed[1].signal(signal.SIGKILL)
    frozen[1].signal(signal.SIGSTOP)
    inside[0].signal(signal.SIGKILL)
    start = time.monotonic()
    cases = [(killed[0], "rank 1 "), (frozen[0], "rank 1 "), (other, "rank 0 ")]
    for site, words in [*cases, (inside[1], "the first process of this site is gone")]:
        assert re.search(words, site.says("ended: (.*)", SLACK)[1]), site.said
    assert time.monotonic() - start < BRIEF + SLACK
