"""The demo of swarms: members as processes of an emulated network, which come, go, and one of which lies."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.options import option
from thinwire.runs.ranks.launcher import Launcher, launcher_of, link_of
from thinwire.runs.ranks.rank_main import await_order, next_order, say
from thinwire.runs.ranks.rendezvous import rank_and_world
from thinwire.runs.ranks.run_config import RunConfig
from thinwire.runs.ranks.supervise import Heard, Workers
from thinwire.runs.records.writer import RUN, load_run, write_json
from thinwire.types import InputError, require
from thinwire.uses.training.swarm.member import SwarmMember
from thinwire.uses.training.swarm.run.clean_run import clean_loss
from thinwire.uses.training.swarm.run.keeper_program import Keeper
from thinwire.uses.training.swarm.run.liars import Liar
from thinwire.uses.training.swarm.run.member_program import join
from thinwire.uses.training.swarm.run.options import SwarmConfig, SwarmJoinConfig
from thinwire.uses.training.swarm.run.record import RoundMetrics, SwarmRecord

PROGRAM = "thinwire.uses.training.swarm.run.swarm_demo:run_rank"
PATIENCE = 300.0  # seconds
FIRST_LIAR = 2  # the rank of the first that lies


@dataclass(frozen=True)
class SwarmDemoConfig(RunConfig):
    """What a swarm trains in the demo, and how its members change."""

    swarm: str = option("{}", "Job", "The keeper's configuration.", metavar="JSON")
    there: int = option(6, "Members", "Members at a time.", metavar="N", least=2, most=8)
    changes: int = option(
        5, "Members", "How often one leaves and another joins.", metavar="N", least=0, most=8
    )
    every: float = option(20.0, "Members", "Seconds from one change to the next.", metavar="SECONDS", above=0)
    lies: str = option(
        "turned",
        "Members",
        "What members that lie send, one each; empty: nobody lies.",
        metavar="LIES",
    )

    @property
    def keeper(self) -> SwarmConfig:
        """What the keeper does."""
        return SwarmConfig.from_json(self.swarm)

    @property
    def ranks(self) -> int:
        return 1 + self.there + self.changes

    @property
    def liars(self) -> dict[int, str]:
        """The lie of each rank that lies."""
        return dict(enumerate(filter(None, self.lies.split(",")), FIRST_LIAR))


Kinds = Callable[[SwarmDemoConfig, int], type[SwarmMember]]


@dataclass
class _Play:
    """What happens: who is there, and when the next change is due."""

    config: SwarmDemoConfig
    workers: Workers
    address: str = ""
    there: list[int] = field(default_factory=list)
    due: float = float("inf")
    over: bool = False

    def start_member(self) -> None:
        rank = self.workers.start(self.config)
        self.workers.order(rank, f"join {self.address}")
        self.there.append(rank)

    def turn(self, heard: Heard | None) -> None:
        """Hear of rounds, and let one leave and another join when it is time."""
        if heard is not None and heard[1]["kind"] == "round" and self.due == float("inf"):
            self.due = time.monotonic() + self.config.every
        self.over = self.over or (heard is not None and heard[1]["kind"] == "served")
        left = self.config.ranks - len(self.workers.processes)
        if time.monotonic() >= self.due and left > 0 and not self.over:
            self.due += self.config.every
            gone = next(rank for rank in self.there if rank not in self.config.liars)
            self.there.remove(gone)
            self.workers.order(gone, "vanish")
            self.start_member()


def play(config: SwarmDemoConfig, told: Callable[[str], object], program: str = PROGRAM) -> SwarmRecord:
    """Run the swarm, then the same samples with all staying and nobody lying; return the record.

    ``program``: of each process, ``MODULE:FUNCTION``.

    Errors: what a process said that failed.
    """
    wrong = f"--lies {config.lies}: nobody of {config.there} would tell the truth; give more members"
    require(len(config.liars) < config.there, InputError, wrong)
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals())
        place = stack.enter_context(launcher_of(config, check=False))
        _run(config, stack, place, told, program)
        record = load_run(folder, SwarmRecord)
        record.link = link_of(config)
        write_json(folder / RUN, record.to_dict())
        place.book(folder)
    record = load_run(folder, SwarmRecord)
    told("as many samples again, by members that all stay and none of which lies")
    record.clean_loss = clean_loss(config.keeper, record, config.there - len(config.liars))
    write_json(folder / RUN, record.to_dict())
    return record


def _run(
    config: SwarmDemoConfig, stack: ExitStack, place: Launcher, told: Callable[[str], object], program: str
) -> None:
    names = ["keeper", *(f"member {k}" for k in range(1, config.ranks))]
    plays: list[_Play] = []

    def turn(heard: Heard | None) -> None:
        if plays:
            plays[0].turn(heard)
        if heard is not None and heard[1]["kind"] in ("round", "note"):
            told(heard[1]["text"])

    workers = stack.enter_context(Workers(place, program, names, turn=turn))
    workers.start(config)
    said = workers.until("listening", 0)
    made = _Play(config, workers, f"{said['port']} {said['token']}")
    plays.append(made)
    for _ in range(config.there):
        made.start_member()
    while not made.over:
        workers.hear(PATIENCE)
    workers.dismiss()


def kind_of(config: SwarmDemoConfig, rank: int) -> type[SwarmMember]:
    """Return what kind of member a rank is."""
    lie = config.liars.get(rank)
    return type("Liar", (Liar,), {"lie": lie}) if lie else SwarmMember


def run_rank(config: SwarmDemoConfig, kinds: Kinds = kind_of) -> None:
    """Keep the swarm as the first rank, train as another, of which ``kinds`` says what it is."""
    rank, _ = rank_and_world()
    torch.set_num_threads(1)
    if rank == 0:
        _keep(config)
    else:
        _take_part(rank, kinds(config, rank))


def _keep(config: SwarmDemoConfig) -> None:
    token = secrets.token_hex(16)
    os.environ["THINWIRE_TOKEN"] = token

    def round_done(line: RoundMetrics, loss: float | None) -> None:
        say("round", text=line.sentence(loss))

    asked = config.keeper.replace(listen=f"{config.host}:0", out=config.out)
    keeper = Keeper(asked, round_done, lambda text: say("note", text=text))
    keeper.run(lambda hub: say("listening", port=hub.port, token=token))
    say("served")
    await_order("stop", PATIENCE)


def _take_part(rank: int, kind: type[SwarmMember]) -> None:
    port, token = await_order("join", PATIENCE)
    os.environ["THINWIRE_TOKEN"] = token
    stop = threading.Event()
    threading.Thread(target=_heed, args=(stop,), daemon=True).start()
    asked = SwarmJoinConfig(
        address=f"{os.environ['MASTER_ADDR']}:{port}", name=f"member-{rank}", patience=PATIENCE, device="cpu"
    )
    join(asked, lambda text: None, kind)
    stop.wait(PATIENCE)


def _heed(stop: threading.Event) -> None:
    """Leave when told to, as a process that is killed does: without a word."""
    while (order := next_order(PATIENCE)) != ["stop"]:
        if order == ["vanish"]:
            os._exit(0)
    stop.set()
