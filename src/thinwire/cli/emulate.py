"""``thinwire emulate``: any command on several ranks, across an emulated network."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table

from thinwire.runs import options as shared
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.machine.standard_streams import PLAIN_WIDTH, draws, print_json, tell
from thinwire.runs.options import Options, option
from thinwire.runs.terminal.typer_options import with_config
from thinwire.types import InputError, ThinwireError, require

if TYPE_CHECKING:
    from thinwire.runs.emulator.network_check import CheckResult
    from thinwire.runs.emulator.session import Emulation

MBIT = 125e3  # bytes/s
Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- COMMAND", help="Run once a rank; without it, the network is only checked."),
]


@dataclass(frozen=True)
class EmulateConfig(Options):
    """The network between ranks, and what is shown of them."""

    link: tuple[str, ...] = option(
        (),
        "",
        "Rate, one-way delay and more, like 100mbit,50ms,jitter=2ms,loss=0.1%,queue=250kB or "
        "up=10mbit,down=50mbit or trace:lte or none; again with RANK= for a rank that is different.",
        metavar="[RANK=]SHAPE",
    )
    ranks: int = option(2, "", "Number of ranks, 2 to 16.")
    congestion: str = option("cubic", "", "TCP's congestion control: cubic, bbr or another that is here.")
    seed: int = option(0, "", "Seed of loss and jitter.")
    json: bool = shared.printed("what was measured as JSON")
    check: bool = option(True, "", "Measure the network before the command starts.")
    prefix: bool = option(True, "", "Put its rank before each line that a command prints.")
    clean: bool = option(False, "", "Only end processes that an emulation left behind, and say which.")


@with_config(EmulateConfig)
def emulate(given: dict[str, Any], command: Command = None) -> None:
    """Run a command on several ranks of this machine, across an emulated network with the kernel's own TCP.

    Each rank is like a machine of its own: a network namespace, with RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT and so on set as torchrun sets them. There is no way out of the emulated network.

    The network is measured first: rate within 3 % of what headers leave, delay within 2 ms. Exit code 4 if
    it is not as asked for, or if this machine was too busy: packets were late, or the router waited for a
    processor, by more than 1 ms or 5 % of the shortest delay (whichever is more) on average, or packets were
    that late in more than 5 % of the seconds (one may be), or the router did not read some in time. Else that
    of the rank that failed first.

    [bold]Examples[/bold]

    thinwire emulate --link 100mbit,50ms -- python train.py

    thinwire emulate --link 1gbit,5ms --link 1=10mbit,80ms --ranks 3 --congestion bbr
    """
    config = EmulateConfig.from_dict(given)
    if config.clean:
        _clean()
        return
    from thinwire.runs.emulator.session import Emulation, check_ranks, find_command

    check_ranks(config.ranks)
    require(bool(config.link), InputError, "no --link is given; write one like 100mbit,50ms, or none")
    require(
        bool(command) or config.check, InputError, "there is nothing to do; give a COMMAND or drop --no-check"
    )
    from thinwire.links.profile import profiles
    from thinwire.runs.ranks.commands import run_ranks

    shapes = profiles(config.link, config.ranks)
    if command:
        find_command(command)  # before anything is built
    console = Console(stderr=bool(command) or config.json, width=None if sys.stderr.isatty() else PLAIN_WIDTH)
    failure = None
    with stopped_by_signals(), Emulation(shapes, config.congestion, config.seed) as net:
        if config.check:
            tell("measuring the network, two to three seconds a way ...")
            _print_check(console, net, net.check())
        if command:
            streams = (sys.stderr if config.json else sys.stdout, sys.stderr)
            show = _show(streams) if config.prefix or config.json else None
            failure = run_ranks(net, command, show, (streams[0].isatty(), streams[1].isatty()))
    if command:
        _print_counters(console, net)
    if config.json:
        print_json(net.describe())
    _end(net, str(failure) if failure else "", failure.exit_code if failure else 0)


def _end(net: Emulation, failure: str, code: int) -> None:
    try:
        net.verdict()
    except ThinwireError:
        if failure:
            tell(failure)
        raise
    if failure:
        error = ThinwireError(failure)
        error.exit_code = code
        raise error


def _show(streams: Sequence[TextIO]) -> Callable[[int, bool, bytes], None]:
    """Return what writes a rank's line to one of the ``streams``: for stdout, and for stderr."""

    def show(rank: int, is_error: bool, line: bytes) -> None:
        stream, end = streams[is_error], "\n"
        text = f"[{rank}] {line.decode('utf-8', 'replace').rstrip()}"
        if draws(stream):  # what stands there may be a progress bar, which the next line replaces
            if line.endswith(b"\r"):
                text, end = text[: shutil.get_terminal_size().columns - 1], ""
            text = f"\r\x1b[K{text}"
        with contextlib.suppress(BrokenPipeError):  # nobody reads on, which is not the command's fault
            kind = stream.encoding or "utf-8"  # of which some know few characters
            stream.write(text.encode(kind, "replace").decode(kind) + end)  # in one call: threads share it
            stream.flush()

    return show


def _print_check(console: Console, net: Emulation, result: CheckResult) -> None:
    about = net.describe()
    console.print(
        f"{len(net.profiles)} ranks, {result.congestion}, as {about['isolation']}, router at "
        f"{about['scheduling']}; checked in {result.seconds:.1f} s:",
        highlight=False,
    )
    table = Table("ranks", "round trip", "asked", "TCP carries", "headers leave", box=None, pad_edge=False)
    for way in result.links:
        found, asked = (
            "any" if rate is None else f"{rate / MBIT:.2f} Mbit/s"
            for rate in (way.rate_found, way.rate_asked)
        )
        trips = (f"{trip * 1e3:.2f} ms" for trip in (way.trip_found, way.trip_asked))
        table.add_row(f"{way.source} → {way.destination}", *trips, found, asked)
    console.print(table)


def _print_counters(console: Console, net: Emulation) -> None:
    table = Table("rank", "", "MB", "segments", "dropped", "lost", box=None, pad_edge=False)
    for rank, counts in enumerate(net.counters()):
        for name, line in (("up", counts.up), ("down", counts.down)):
            numbers = (line.passed.segments, line.dropped.segments, line.lost.segments)
            table.add_row(str(rank), name, f"{line.passed.nbytes / 1e6:.3f}", *map(str, numbers))
    console.print(table)
    late, state = net.lateness(), net.state()
    console.print(
        f"late by {late.mean * 1e3:.3f} ms on average (limit {net.limit * 1e3:.2f}), {late.p99 * 1e3:.2f} ms "
        f"at the 99th percentile, {late.worst * 1e3:.2f} ms at most; the router took "
        f"{state['cpu_share'] * 100:.0f} % of a core",
        highlight=False,
        soft_wrap=True,
    )


def _clean() -> None:
    from thinwire.runs.emulator.process_cleanup import clean

    ended = clean()
    for orphan in ended:
        tell(f"ended process {orphan.pid}: {orphan.command[:100]}")
    if not ended:
        tell("nothing was left behind: namespaces and devices go with their processes")
