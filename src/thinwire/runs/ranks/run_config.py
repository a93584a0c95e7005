"""Options that every run of several processes has: its folder, its link, its processes and machines."""

from __future__ import annotations

import os
from dataclasses import dataclass

from thinwire.links.security import is_loopback
from thinwire.links.tcp import congestion
from thinwire.runs import options as shared
from thinwire.runs.options import Options, flag, option
from thinwire.types import InputError

JOB = "Job"
LINK = "Link"
MACHINES = "Processes and machines"
OUTPUT = "Output"


@dataclass(frozen=True)
class RunConfig(Options):
    """Say where a run's processes live, what lies between them, and where their records go."""

    out: str = option(
        "runs/run",
        JOB,
        "Folder of the run; a run there is replaced, with its model, unless this one resumes it.",
        metavar="DIR",
        free=True,
    )
    seed: int = option(
        0, JOB, "Seed of weights, data order and random rounding.", metavar="N", least=0, most=10**12
    )  # times a million and a pass's number, it is still a seed to torch

    link: str = option(
        "none",
        LINK,
        "Shape the link: rate per direction and one-way delay, as in 10mbit,30ms[,jitter=2ms][,loss=0.1%]; "
        "with --emulate also trace:FILE, up=, down=, queue=, and 0=...;1=... for each rank.",
        metavar="SHAPE",
        free=True,
        alike=True,
    )
    emulate: bool = option(
        False,
        LINK,
        "Shape the link below the kernel's TCP, each process in a network namespace of its own (Linux).",
        free=True,
    )
    congestion: str = option(
        "auto",
        LINK,
        "TCP congestion control; auto: bbr where programs may choose it, and cubic over emulated links.",
        metavar="NAME",
        choices=("auto", "system", "cubic", "bbr"),
        free=True,
    )

    host: str = option(
        "127.0.0.1",
        MACHINES,
        "Address this machine listens on (ranks may set THINWIRE_HOST); off loopback it needs a token.",
        metavar="ADDRESS",
        free=True,
        variable="THINWIRE_HOST",
    )
    port: int = option(
        0,
        MACHINES,
        "First port to listen on; each further pair of processes takes the next. 0 takes free ones.",
        metavar="PORT",
        least=0,
        free=True,
    )
    advertise: str | None = option(
        None,
        MACHINES,
        "Address by which the others reach this machine (default: --host); PORT if a router maps it.",
        metavar="HOST[:PORT]",
        free=True,
    )
    relay: str | None = option(
        None,
        MACHINES,
        "A running `thinwire relay`, for ranks that can only dial out; all ranks give the same.",
        metavar="HOST:PORT",
        free=True,
    )
    token_file: str | None = shared.token_file(MACHINES)
    deadline: float = option(
        180.0,
        MACHINES,
        "Seconds without data after which a wait for a living process fails; a dead one is noticed in 20.",
        metavar="SECONDS",
        above=0,
        most=10**6,
        free=True,
    )
    threads: int = option(
        0,
        MACHINES,
        "Compute threads of a process; 0 shares the cores out.",
        metavar="N",
        least=0,
        most=1024,
        free=True,
    )

    quiet: bool = shared.quiet(OUTPUT)
    json: bool = shared.printed("the run record", OUTPUT)

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        raise NotImplementedError

    def validate(self) -> None:
        """Raise ``InputError`` for a link or an address that cannot work."""
        # Imported here, because a reader of records needs none of them.
        from thinwire.links.address import Route
        from thinwire.links.profile import plain_shape
        from thinwire.links.relay.tunnel import check_relay
        from thinwire.links.security import check_host, read_token

        if self.emulate:
            _emulated(self)
        else:
            plain_shape(self.link, "add --emulate")
            congestion.resolve(self.congestion)
        token = read_token(self.token_file)
        if self.relay is not None:
            Route.parse(self.relay)
            check_relay(token)
            return  # nobody reaches this machine, so its addresses do not matter
        check_host(self.host, token)
        _addresses(self)


def _emulated(config: RunConfig) -> None:
    from thinwire.links.profile import profiles

    profiles(config.link.split(";"), config.ranks)
    told = [name for name in ("relay", "advertise") if getattr(config, name) is not None]
    if not is_loopback(config.host) and congestion.EMULATED not in os.environ:  # inside ranks have theirs
        told.append("host")
    if told:
        raise InputError(
            f"--emulate gives every process an address of its own; leave {flag(told[0])} out, or --emulate"
        )


def _addresses(config: RunConfig) -> None:
    from thinwire.links.address import MAX_PORT, parse_address
    from thinwire.links.mesh import EVERYWHERE, pair_number

    shown, mapped = parse_address(config.advertise or config.host)
    if shown in EVERYWHERE:
        raise InputError(f"others cannot reach {shown}; give the address by which they do as --advertise")
    if mapped is not None and not config.port:
        raise InputError(f"--advertise {config.advertise} names a port that leads to --port; give both")
    last = pair_number(config.ranks - 2, config.ranks - 1, config.ranks)
    for name, first in (("port", config.port), ("advertise", mapped or 0)):
        if first + last >= MAX_PORT:
            many = f" for {last + 1} in a row" if last else ""
            raise InputError(f"--{name} {first} is too high{many}; take one below {MAX_PORT - last}")
