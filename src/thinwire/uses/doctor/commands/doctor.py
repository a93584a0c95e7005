"""``thinwire doctor``: what this machine has and lacks, and what the link to another one can carry."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire.links.address import Address
from thinwire.links.security import check_host, is_loopback, read_token
from thinwire.runs import options as shared
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.machine.network import Interface, interfaces, way_out
from thinwire.runs.machine.standard_streams import print_json, tell
from thinwire.runs.options import Options, flag, option
from thinwire.runs.records.progress import megabytes
from thinwire.runs.terminal.typer_options import with_config
from thinwire.types import InputError, require
from thinwire.uses.doctor.run.check import BROKEN, LACKS, OK, PORT, SECONDS, Check

if TYPE_CHECKING:
    from thinwire.uses.doctor.run.linktest import LinkTest, MeasuredWay

MARKS = {OK: "[green]has[/green]", LACKS: "[yellow]lacks[/yellow]", BROKEN: "[bold red]broken[/bold red]"}
LINK = "The link to another machine"
LISTEN, PEER = "--listen", "--peer"
USED_BY: dict[str, tuple[str, ...]] = {"host": (LISTEN,), "port": (LISTEN,), "once": (LISTEN,)}
USED_BY |= {"seconds": (PEER,), "token_file": (LISTEN, PEER)}


@dataclass(frozen=True)
class DoctorConfig(Options):
    """What to look at: this machine, or the link to another one."""

    json: bool = shared.printed("the findings as JSON")
    listen: bool = option(False, LINK, "Wait for peers that measure the link to here.")
    peer: str | None = option(None, LINK, "Measure the link to a listener there.", metavar="HOST[:PORT]")
    host: str = shared.listen_host("0.0.0.0", LINK)
    port: int = shared.listen_port(PORT, LINK)
    token_file: str | None = shared.token_file(LINK)
    once: bool = option(False, LINK, "Listen for one peer only.")
    seconds: float = option(SECONDS, LINK, "Length of the transfer in each direction.", least=0.5, most=15)


@with_config(DoctorConfig, file=False)
def doctor(given: dict[str, Any]) -> None:
    """Say what this machine has and lacks; with --peer, what the link to another machine carries.

    Ends with exit code 2 if thinwire cannot work here at all, 3 if the peer cannot be reached.

    [bold]Examples[/bold]

    thinwire doctor --listen --token-file secret

    thinwire doctor --peer 192.0.2.7 --token-file secret
    """
    both = "listen" in given and "peer" in given
    require(not both, InputError, "--listen and --peer are for two machines; give one of them")
    _check_used(given, LISTEN if "listen" in given else PEER if "peer" in given else None)
    config = DoctorConfig.from_dict(given)
    if config.listen:
        _listen(config, read_token(config.token_file))
    elif config.peer is not None:
        _dial(Address.parse(config.peer, PEER, like=PORT, port=PORT), config)
    else:
        _diagnose(config.json)


def _check_used(given: dict[str, Any], mode: str | None) -> None:
    """Raise ``InputError`` for an option that was given and that a test by ``mode`` has no use for."""
    for name, modes in USED_BY.items():
        if name in given and mode not in modes:
            use = f"leave it out with {mode}" if mode else f"give {' or '.join(modes)} too, or leave it out"
            raise InputError(f"{flag(name)} is for {' and '.join(modes)} alone; {use}")


def _listen(config: DoctorConfig, token: bytes | None) -> None:
    from thinwire.uses.doctor.run.linktest import listen

    host = config.host
    check_host(host, token)
    own = ", ".join(map(str, interfaces())) or "none but loopback"
    tell(f"this machine's addresses: {own}")
    if is_loopback(host):
        tell(f"{host} can be reached from this machine alone; listen at another one for others")
    tell("on the other machine: thinwire doctor --peer ADDRESS; Ctrl-C ends this one")
    try:
        with stopped_by_signals():
            listen(host, config.port, token, config.once, tell=tell)
    except KeyboardInterrupt:  # how it is meant to end
        tell("stopped listening")


def _dial(at: Address, config: DoctorConfig) -> None:
    from thinwire.uses.doctor.run.linktest import dial

    token = read_token(config.token_file)
    check_host(at.host, token)
    tell(f"measuring the link to {at.host}, {config.seconds:g} s each way ...")
    test = dial(*at, token, config.seconds)
    if config.json:
        print_json(_plain(test))
    else:
        _print_link(test, way_out(*at))


def _plain(test: LinkTest) -> dict[str, Any]:
    links = {"out": str(test.shape(test.out)), "back": str(test.shape(test.back))}
    lines = {"out": str(test.line(test.out)), "back": str(test.line(test.back))}
    more = {"links": links, "lines": lines, "toml": test.fragment(), "advice": _advice(test)}
    return dataclasses.asdict(test) | more


def _advice(test: LinkTest) -> list[str]:
    from thinwire.uses.doctor.run.advice import advice
    from thinwire.uses.doctor.run.paying import coding_seconds, pays  # it needs torch

    return [*advice(test), pays(min(test.out.rate, test.back.rate), coding_seconds())]


def _print_link(test: LinkTest, leaves: Interface | None) -> None:
    console = Console(highlight=False)
    here, there = escape(test.here.name), escape(test.there.name)
    table = Table(
        "", f"{here} → {there}", f"{there} → {here}", box=None, pad_edge=False, padding=(0, 3, 0, 0)
    )
    for name, of in _ROWS.items():
        table.add_row(name, of(test.out), of(test.back))
    table.add_row("as --link", str(test.shape(test.out)), str(test.shape(test.back)))
    table.add_row("as --link to emulate", str(test.line(test.out)), str(test.line(test.back)))
    console.print(table)
    console.print(
        f"\nround trip {test.rtt * 1e3:.1f} ms at least, {test.median_rtt * 1e3:.1f} ms in the median, "
        f"jitter {test.jitter * 1e3:.1f} ms; packets leave here by {escape(str(leaves or 'an unknown way'))}"
    )
    for sentence in _advice(test):
        console.print(f"[dim]→ {escape(sentence)}[/dim]")
    console.print("\nFor thinwire plan:\n")
    console.print(escape(test.fragment()), end="")


def _again(way: MeasuredWay) -> str:
    return "no TCP_INFO" if way.retransmitted is None else f"{way.retransmitted:.2%}"


def _loaded(way: MeasuredWay) -> str:
    return "no TCP_INFO" if way.loaded_rtt is None else f"{way.loaded_rtt * 1e3:.1f} ms"


_ROWS = {
    "rate": lambda way: f"{way.rate * 8e-6:,.4g} Mbit/s",
    "carried": lambda way: f"{megabytes(way.nbytes)} in {way.seconds:.1f} s",
    "sent again": _again,
    "round trip under load": _loaded,
    "congestion control": lambda way: escape(way.congestion or "not known"),
}


def _diagnose(json: bool) -> None:
    from thinwire.uses.doctor.run.diagnosis import diagnose  # it needs torch

    checks = diagnose()
    if json:
        print_json([dataclasses.asdict(check) for check in checks])
    else:
        _print(checks)
    broken = [check.name for check in checks if check.status == BROKEN]
    if broken:
        raise InputError(f"thinwire cannot work here: {', '.join(broken)}; follow the remedies above")


def _print(checks: list[Check]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for check in checks:
        text = escape(check.finding)
        if check.remedy:
            text += f"\n[dim]→ {escape(check.remedy)}[/dim]"
        table.add_row(MARKS[check.status], check.name, text)
    console = Console()
    console.print(table)
    lacking = sum(check.status == LACKS for check in checks)
    console.print(
        f"\n{len(checks) - lacking} of {len(checks)} in place." if lacking else "\nEverything is in place."
    )
