"""``thinwire doctor``: what this machine has and lacks, and what the link to another one can carry."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire.cli.terminal.output import print_json, tell
from thinwire.lab.doctor.check import BROKEN, LACKS, OK, PORT, SECONDS, Check
from thinwire.lab.machine.interrupts import stopped_by_signals
from thinwire.lab.machine.network import Interface, interfaces, way_out
from thinwire.lab.records.progress import megabytes
from thinwire.links.address import check_port, parse_address
from thinwire.links.security import check_host, is_loopback, read_token
from thinwire.types import InputError, require

if TYPE_CHECKING:
    from thinwire.lab.doctor.linktest import LinkTest, MeasuredWay

MARKS = {OK: "[green]has[/green]", LACKS: "[yellow]lacks[/yellow]", BROKEN: "[bold red]broken[/bold red]"}
LINK = "The link to another machine"
LISTEN, PEER = "--listen", "--peer"
USED_BY: dict[str, tuple[str, ...]] = {"host": (LISTEN,), "port": (LISTEN,), "once": (LISTEN,)}
USED_BY |= {"seconds": (PEER,), "token_file": (LISTEN, PEER)}
Json = Annotated[
    bool, typer.Option("--json", help="Print the findings as JSON, and nothing else, on stdout.")
]
Listen = Annotated[
    bool,
    typer.Option("--listen", help="Wait for peers that measure the link to here.", rich_help_panel=LINK),
]
Peer = Annotated[
    str | None,
    typer.Option(metavar="HOST[:PORT]", help="Measure the link to a listener there.", rich_help_panel=LINK),
]
Host = Annotated[str, typer.Option(help="Address to listen at.", rich_help_panel=LINK)]
Port = Annotated[int, typer.Option(help="TCP port to listen at; 0 takes a free one.", rich_help_panel=LINK)]
TokenFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="File with the token that both ends share (or set THINWIRE_TOKEN).",
        rich_help_panel=LINK,
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Listen for one peer only.", rich_help_panel=LINK)]
Seconds = Annotated[
    float, typer.Option(help="Length of the transfer in each direction.", rich_help_panel=LINK)
]


def doctor(
    ctx: typer.Context,
    json: Json = False,
    listening: Listen = False,
    peer: Peer = None,
    host: Host = "0.0.0.0",
    port: Port = PORT,
    token_file: TokenFile = None,
    once: Once = False,
    seconds: Seconds = SECONDS,
) -> None:
    """Say what this machine has and lacks; with --peer, what the link to another machine carries.

    Ends with exit code 2 if thinwire cannot work here at all, 3 if the peer cannot be reached.

    [bold]Examples[/bold]

    thinwire doctor --listen --token-file secret

    thinwire doctor --peer 192.0.2.7 --token-file secret
    """
    require(
        not (listening and peer), InputError, "--listen and --peer are for two machines; give one of them"
    )
    _check_used(ctx, LISTEN if listening else PEER if peer is not None else None)
    if listening:
        check_port(port, "--port")
        _listen(host, port, read_token(token_file), once)
    elif peer is not None:
        require(0.5 <= seconds <= 15, InputError, f"--seconds is {seconds:g}; it must be 0.5 to 15")
        _dial(peer, read_token(token_file), seconds, json)
    else:
        _diagnose(json)


def _check_used(ctx: typer.Context, mode: str | None) -> None:
    """Raise ``InputError`` for an option that was given and that a test by ``mode`` has no use for."""
    for name, modes in USED_BY.items():
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and mode not in modes:
            use = f"leave it out with {mode}" if mode else f"give {' or '.join(modes)} too, or leave it out"
            raise InputError(f"--{name.replace('_', '-')} is for {' and '.join(modes)} alone; {use}")


def _listen(host: str, port: int, token: bytes | None, once: bool) -> None:
    from thinwire.lab.doctor.linktest import listen

    check_host(host, token)
    own = ", ".join(map(str, interfaces())) or "none but loopback"
    tell(f"this machine's addresses: {own}")
    if is_loopback(host):
        tell(f"{host} can be reached from this machine alone; listen at another one for others")
    tell("on the other machine: thinwire doctor --peer ADDRESS; Ctrl-C ends this one")
    try:
        with stopped_by_signals():
            listen(host, port, token, once, tell=tell)
    except KeyboardInterrupt:  # how it is meant to end
        tell("stopped listening")


def _dial(peer: str, token: bytes | None, seconds: float, json: bool) -> None:
    from thinwire.lab.doctor.linktest import dial

    host, port = parse_address(peer)
    require(bool(host), InputError, "--peer is empty; give HOST or HOST:PORT")
    check_host(host, token)
    tell(f"measuring the link to {host}, {seconds:g} s each way ...")
    test = dial(host, port or PORT, token, seconds)
    if json:
        print_json(_plain(test))
    else:
        _print_link(test, way_out(host, port or PORT))


def _plain(test: LinkTest) -> dict[str, Any]:
    links = {"out": str(test.shape(test.out)), "back": str(test.shape(test.back))}
    lines = {"out": str(test.line(test.out)), "back": str(test.line(test.back))}
    more = {"links": links, "lines": lines, "toml": test.fragment(), "advice": _advice(test)}
    return dataclasses.asdict(test) | more


def _advice(test: LinkTest) -> list[str]:
    from thinwire.lab.doctor.advice import advice
    from thinwire.lab.doctor.paying import coding_seconds, pays  # it needs torch

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
    from thinwire.lab.doctor.diagnosis import diagnose  # it needs torch

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
