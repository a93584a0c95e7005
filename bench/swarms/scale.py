"""How many members one keeper of a swarm bears, and what a tree does beyond it: ``make bench-swarm-scale``.

Time is virtual, members' work is real: 4 to 64 members of unequal speed and links, who come and go, train a
small GPT-2 by the code of the commands (server, judge, assignments, deadlines, samples, members). A keeper's
CPU seconds are those of ``gpt2-lab``, for each act as the cells ``update`` measure it (also at a larger
size), and go off its clock. Bytes are counted, times what ``gpt2-lab`` has more values than the small model.
``python -m bench.swarms.scale [WORD ...]``: the cells that have these words.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mean
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.study.cells import Kept, run_study
from bench.study.tables import Draw, Rows, tabled
from thinwire.choosing.difference_codes import Sides
from thinwire.links.trace import ConstantRate
from thinwire.rounds.aggregation import Synchronous
from thinwire.rounds.aggregation_server import Accepted, Server
from thinwire.rounds.client_profile import ClientPace, ClientProfile
from thinwire.rounds.client_scheduler import ClientScheduler, MadeVersion
from thinwire.rounds.download import DeltaDownload
from thinwire.rounds.parameters import Parameters
from thinwire.rounds.remote.branch import HURRY, Branch, BranchServer, RoundSum
from thinwire.rounds.remote.remote_server import GRACE
from thinwire.rounds.update_messages import Held, VersionMessage
from thinwire.runs.machine.compute import ON_CPU
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.models.stage import ModelStage
from thinwire.types import MeasurementError, PayloadError, require
from thinwire.uses.federated.run.simulation import SharedLine
from thinwire.uses.training.run.training_job import Lesson, read_texts
from thinwire.uses.training.swarm.choosing.swarm_policy import Together, deadline
from thinwire.uses.training.swarm.gauntlet import Gauntlet
from thinwire.uses.training.swarm.local_adamw import LocalAdamW
from thinwire.uses.training.swarm.member import SharedBlocks
from thinwire.uses.training.swarm.passed_share import PassedShare
from thinwire.uses.training.swarm.run.member_program import new_member
from thinwire.uses.training.swarm.run.options import SwarmConfig
from thinwire.uses.training.swarm.run.swarm_model import Evaluator, build_whole
from thinwire.uses.training.swarm.schedule import RoundRates
from thinwire.uses.training.swarm.work_pool import WorkPool

KEPT = Kept("scale")
MEMBERS, ROUNDS, SEED = (4, 8, 16, 32, 64), {"keeper": 4, "tree": 8}, 0
LAST = 3  # rounds that figures are of: a branch first learns how fast its members are
LINES = (100, 1000)  # Mbit/s of a keeper or branch, each way, which all its transfers share
BRANCHES = 8  # of a tree, each of so many members
SMALL, LAB, LARGE = (1, 64, 2), (4, 256, 4), (4, 768, 12)  # layers, width, heads
LAB_VALUES = 4_470_272
BATCH, SEQ, STEPS, RATE = 2, 16, 2, 1e-3  # STEPS: of the median member
STEP_SECONDS, LINKS = (0.4, 5.0), (20, 1000)  # from GPU to slow CPU, seconds; Mbit/s; both log-uniform
STAYS, AWAY = 600.0, 60.0  # seconds that a member is there, and is gone, on average
UPDATES = {"lab": (2, 12), "large": (2, 4)}  # of a round in cells of ``update``, by shape
MBIT = 125e3


class Cell(NamedTuple):
    kind: str  # one keeper, a tree of branches, or the CPU of updates
    members: int = 0
    line: int | None = None  # of the keeper, Mbit/s
    shape: str = ""


def cells() -> Iterator[Cell]:
    """Yield all cells, short ones first."""
    yield from (Cell("update", n, None, shape) for shape in UPDATES for n in UPDATES[shape])
    yield from (Cell("keeper", n, line) for n in MEMBERS for line in LINES)
    yield from (Cell("tree", max(MEMBERS), line) for line in LINES)


@lru_cache(maxsize=1)
def texts() -> Lesson:
    """Return the text, and the tokenizer of ``gpt2-lab``."""
    config = {"model": "gpt2-lab", "data": "shakespeare", "seq": SEQ, "batch": BATCH, "eval_samples": 64}
    return read_texts(SwarmConfig.from_dict(config), trial=False)


@dataclass
class World:
    """The virtual clock, and what is to happen."""

    now: float = 0.0

    def __post_init__(self) -> None:
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._added = 0
        self.going = True

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Let something happen; of equal moments, what was added first."""
        heapq.heappush(self._agenda, (max(when, self.now), self._added, what))
        self._added += 1

    def run(self) -> None:
        """Go on until nothing is to happen, or somebody says so."""
        while self.going and self._agenda:
            self.now, _, what = heapq.heappop(self._agenda)
            what()


class Line:
    """One direction of a host's link, which its transfers share."""

    def __init__(self, world: World, rate: float) -> None:
        self._world, self._line = world, SharedLine(ConstantRate(rate))

    def send(self, nbytes: int, own: float, delay: float, then: Callable[[], object]) -> None:
        """Send bytes over this line and another's own, bytes/s."""
        world = self._world
        self._line.add(world.now, nbytes, ConstantRate(own), lambda at: world.at(at + delay, then))
        self._look()

    def _look(self) -> None:
        due = self._line.due
        if due < math.inf:
            self._world.at(due, lambda: self._through(due))

    def _through(self, due: float) -> None:
        if self._line.due == due:  # else it changed since
            self._line.advance(due)
            self._look()


class Costs(NamedTuple):
    """CPU seconds of a host at ``gpt2-lab``'s size, as the cells ``update`` found them."""

    issue: float
    receive: float
    fixed: float  # of a version
    each: float  # of an update in it
    block: float  # of the loss of a block


def costs(shape: str = "lab") -> Costs:
    """Return what was measured. Errors: ``MeasurementError`` where that is still to do."""
    few, many = (KEPT.get(Cell("update", n, None, shape)) for n in UPDATES[shape])
    require(bool(few and many), MeasurementError, f"measure first what updates cost: {shape}")
    least, most = UPDATES[shape]
    each = (many["close"] - few["close"]) / (most - least)
    fixed = few["close"] - least * each
    return Costs(many["issue"], many["receive"], fixed, each, many["block"])


class Cpu:
    """CPU seconds of a host: each act is charged what it takes at ``gpt2-lab``'s size.

    ``measured``: what the same took here, with the small model.
    """

    def __init__(self, world: World) -> None:
        self._world, self._inside = world, False
        self.costs, self.charged, self.measured, self.free = costs(), 0.0, 0.0, 0.0

    def charge(self, seconds: float) -> None:
        """Let the host be busy so long, after what it does now."""
        self.charged += seconds
        self.free = max(self.free, self._world.now) + seconds

    @contextmanager
    def used(self) -> Iterator[None]:
        """Measure a block."""
        if self._inside:
            yield
            return
        self._inside, began = True, process_time()
        try:
            yield
        finally:
            self._inside = False
            self.measured += process_time() - began

    def clock(self) -> float:
        """Return the seconds of the host's own clock, for its judge."""
        return self._world.now + self.charged


@dataclass(eq=False)
class Peer:
    """One member, or a branch, as its host sees it. ``answer`` trains, and says when the update is there."""

    profile: ClientProfile
    answer: Callable[[VersionMessage, Tensor, Callable[[bytes, int], object]], object]
    there: bool = True
    held: Held | None = None
    sequence: int = 0
    turn: int = 0  # the sequence number of what is under way; 0 for nothing


class Host:
    """A server on the virtual clock, with its link, its CPU and its peers; as on a port."""

    def __init__(self, world: World, server: Server, policy: Together, line: float, cpu: Cpu) -> None:
        self.world, self.server, self.policy, self.cpu = world, server, policy, cpu
        self.down, self.up, self.peers = Line(world, line), Line(world, line), dict[int, Peer]()
        self.deadlines, self.limit, self._round = list[float](), math.inf, 0
        self.late, self.refused = 0, 0

    def schedule(self, made: Callable[[MadeVersion], bool], once: bool = False) -> None:
        """Let rounds begin, until ``made`` says so; ``once``: no round that nobody answered is repeated."""
        self._left = 1 if once else 1 << 60

        def heard(version: MadeVersion) -> bool:
            self.cpu.charge(self.cpu.costs.fixed + self.cpu.costs.each * version.updates)
            return made(version)

        self.conductor = ClientScheduler(
            self.server, self._present, self._begin, heard, lambda: self.world.now, SEED, asked_again=1 << 30
        )
        self.conductor.start(self.peers)

    def _present(self) -> list[int]:
        """Return who is there; a round begins, and ends at its deadline."""
        if not self._left:
            self.conductor.going = False
            return []
        self._left -= 1
        here = [c for c, peer in self.peers.items() if peer.there]
        self._round += 1
        number = self._round
        found = self.server.assignments()
        devices = [self.server.device(c) for c in found]
        values = self.server.weights.numel()
        longest = min(self.limit, deadline(devices, list(found.values()), values, self.policy))
        self.deadlines.append(longest)
        self.world.at(max(self.world.now, self.cpu.free) + longest, lambda: self._end(number))
        return here

    def _begin(self, client: int) -> None:
        peer = self.peers[client]
        with self.cpu.used():
            version = self.server.issue(client, peer.held, peer.sequence)
            version = replace(version, seconds=self.deadlines[-1])
            nbytes = len(version.pack())
        self.cpu.charge(self.cpu.costs.issue)
        peer.turn, start, profile = version.sequence, self.server.given, peer.profile

        def arrived() -> None:
            if peer.there and peer.turn == version.sequence:
                peer.held = version.held
                peer.answer(version, start, lambda data, sequence: self._upload(client, data, sequence))

        self.world.at(self.cpu.free, lambda: self.down.send(nbytes, profile.down, profile.delay, arrived))

    def _upload(self, client: int, data: bytes, sequence: int) -> None:
        peer = self.peers[client]
        own, delay = peer.profile.up, peer.profile.delay
        self.up.send(len(data), own, delay, lambda: self._queue(client, data, sequence))

    def _queue(self, client: int, data: bytes, sequence: int) -> None:
        """Look at an update once the CPU is free."""
        if self.cpu.free > self.world.now:
            self.world.at(self.cpu.free, lambda: self._queue(client, data, sequence))
        elif self.peers[client].turn == sequence and self.peers[client].there:
            self._receive(client, data, sequence)

    def _receive(self, client: int, data: bytes, sequence: int) -> None:
        peer = self.peers[client]
        peer.turn, peer.sequence = 0, sequence
        self.cpu.charge(self.cpu.costs.receive)
        with self.cpu.used():
            found = self.server.receive(client, data)
        require(isinstance(found, Accepted), PayloadError, f"an honest update was refused: {found}")
        self.conductor.came(client, found)
        self._shorten()

    def gone(self, client: int) -> None:
        """Let a peer vanish."""
        peer = self.peers[client]
        peer.there = False
        if not peer.turn:
            self.server.leave(client)
        self._shorten()

    def back(self, client: int) -> None:
        """Let a peer be there again."""
        peer = self.peers[client]
        peer.there = True
        self.server.join(peer.profile)

    def _shorten(self) -> None:
        """Wait only a moment longer for those that are gone, once all others have answered."""
        missing, number = self.server.missing, self._round
        if missing and self.server.answers[0] and not any(self.peers[c].there for c in missing):
            self.world.at(self.world.now + GRACE, lambda: self._end(number))

    def _end(self, number: int) -> None:
        """Give up those who have not answered in this round."""
        for client in self.server.missing:
            if number == self._round and client in self.server.missing:
                self.late += self.peers[client].there
                self.peers[client].turn = 0
                with self.cpu.used():  # giving the last one up makes the version
                    self.conductor.late(client, leaves=not self.peers[client].there)


class Swarm:
    """Members, a keeper, and branches between them, of one cell."""

    def __init__(self, cell: Cell) -> None:
        torch.manual_seed(SEED)
        torch.set_num_threads(1)
        self.cell, self.world, self.draw = cell, World(), random.Random(SEED)
        self.lesson = texts()
        self.model = built(SMALL)
        self.parameters = Parameters(self.model)
        self.scale = LAB_VALUES / self.parameters.numel
        self.evaluator = Evaluator(self.model, self.parameters, ON_CPU)
        self.line = (cell.line or 0) * MBIT / self.scale
        sides = Sides.of(self.parameters.matrices, self.parameters.numel) or Sides(0, 0)
        self.policy = Together(STEPS, sides.total, sides.loose)
        self.pool = WorkPool(self.lesson.train, BATCH, SEED)
        self.cpu = Cpu(self.world)
        down = DeltaDownload(self.policy.download(self.parameters.numel))
        rates, judge = RoundRates(RATE), self.judge(self.pool.assigned, self.lesson.heldout[64:128], self.cpu)
        server = Server(self.parameters, Synchronous(), self.policy, down, rates, self.pool, judge)
        self.top = Host(self.world, server, self.policy, self.line, self.cpu)
        self.branches: list[Host] = []
        self.made: list[MadeVersion] = []
        self.seen: list[dict[str, float]] = []  # what had been counted when each was made

    def judge(self, assigned: Callable[[int], Tensor | None], heldout: Tensor, cpu: Cpu) -> Gauntlet:
        """Return a judge whose time is the host's."""

        def losses(row: Tensor, blocks: Tensor) -> Tensor:
            cpu.charge(cpu.costs.block * len(blocks))
            return self.evaluator.losses(row, blocks)

        return Gauntlet(losses, assigned, heldout, SEED, clock=cpu.clock)

    def run(self) -> dict[str, Any]:
        """Run the rounds; return what they came to."""
        tree = self.cell.kind == "tree"
        hosts = [self.branch(i) for i in range(BRANCHES)] if tree else [self.top]
        for i in range(self.cell.members):
            self.add(hosts[i % len(hosts)], i)
        for number, host in enumerate(self.branches):
            self.hang(host, number)
        first = self.evaluator.mean(self.top.server.weights, self.lesson.heldout[:64])
        self.top.schedule(self.note)
        self.world.run()
        wrong = f"{len(self.made)} rounds were made"
        require(len(self.made) == ROUNDS[self.cell.kind], MeasurementError, wrong)
        return self.figures(first)

    def note(self, made: MadeVersion) -> bool:
        """Keep what a round came to; say whether to go on."""
        self.made.append(made)
        traffic = [self.top.server.traffic(c) for c in self.top.server.known]
        self.seen.append(
            {
                "round_s": made.at,
                "samples": self.top.conductor.tally.samples.total(),
                "up": sum(t.up for t in traffic) * self.scale,
                "down": sum(t.down for t in traffic) * self.scale,
                "cpu_s": self.cpu.charged,
                "cpu_small_s": self.cpu.measured,
                "branch_cpu_s": sum(h.cpu.charged for h in self.branches) / max(1, len(self.branches)),
            }
        )
        self.world.going = len(self.made) < ROUNDS[self.cell.kind]
        return self.world.going

    def profile(self, number: int, seed: int) -> ClientProfile:
        """Return a member's speed and link, drawn from a fixed seed."""
        draw = random.Random(seed)

        def between(low: float, high: float) -> float:
            return math.exp(draw.uniform(math.log(low), math.log(high)))

        step, up, down = between(*STEP_SECONDS), between(*LINKS), between(*LINKS)
        rates = (rate * MBIT / self.scale for rate in (up, max(up, down)))
        return ClientProfile(number, step, 1 << 20, *rates, delay=0.02, name=f"member {seed}")

    def add(self, host: Host, seed: int) -> None:
        """Let a member join a host, and come and go."""
        number, world = len(host.peers), self.world
        blocks = SharedBlocks(BATCH, SEQ, vocabulary())
        member = new_member(number, self.model, blocks, LocalAdamW(), self.parameters, ON_CPU, SEED)
        profile = self.profile(number, seed)

        def answer(version: VersionMessage, start: Tensor, put: Callable[[bytes, int], object]) -> None:
            update = member.train(version, start)
            seconds = version.steps * profile.step_seconds
            world.at(world.now + seconds, lambda: put(update.pack(), update.sequence))

        peer = host.peers[number] = Peer(profile, answer, held=self.top.server.newest)
        host.server.join(profile)

        def leaves() -> None:
            host.gone(number)
            world.at(world.now + self.draw.expovariate(1 / AWAY), comes)

        def comes() -> None:
            if peer.turn:  # nobody has noticed yet
                world.at(world.now + GRACE, comes)
                return
            member.moments.forget()
            host.back(number)
            world.at(world.now + self.draw.expovariate(1 / STAYS), leaves)

        world.at(self.draw.expovariate(1 / STAYS), leaves)

    def branch(self, number: int) -> Host:
        """Return a branch that nobody is at yet."""
        cpu, share = Cpu(self.world), PassedShare(BATCH, vocabulary())

        def divided(steps: int) -> Together:
            return replace(self.policy, together=steps)

        server = BranchServer(self.parameters, divided, share)
        host = Host(self.world, server, self.policy, self.line, cpu)
        self.branches.append(host)
        return host

    def together(self, members: Sequence[ClientProfile]) -> ClientPace:
        """Return how fast the members of a branch are together."""
        return self.policy.pace(members, self.parameters.numel)

    def hang(self, host: Host, number: int) -> None:
        """Let a branch, with its members, be one member of the keeper."""
        server, world = host.server, self.world
        require(isinstance(server, BranchServer), TypeError, "a branch has a server of its own kind")
        above = Branch(self.model, server, self.parameters, self.together)  # type: ignore[arg-type]
        above.id = number
        draw = {"step_seconds": above.pace().step_seconds, "samples": 1 << 20, "name": f"branch {number}"}
        profile = ClientProfile(number, up=self.line, down=self.line, delay=0.02, **draw)  # type: ignore[arg-type]
        peer = self.top.peers[number] = Peer(replace(profile, **above.pace()._asdict()), lambda *_: None)
        server.passed.follow(self.top.server.lead(None, b""))  # as all hold the first version
        peer.held = self.top.server.newest
        self.top.server.join(peer.profile)

        def answer(version: VersionMessage, start: Tensor, put: Callable[[bytes, int], object]) -> None:
            began = world.now

            def summed(found: RoundSum) -> None:
                if not found.samples:
                    return  # the keeper gives it up at its deadline
                update = above.answer(version, found.change)
                steps = max(1, found.samples // BATCH)
                update = replace(update, samples=found.samples, steps=steps, left=found.left)
                peer.profile = replace(peer.profile, **above.pace(world.now - began, steps)._asdict())

                def up() -> None:
                    if host.cpu.free > world.now:  # it still sums
                        world.at(host.cpu.free, up)
                        return
                    self.top.server.join(peer.profile)
                    put(update.pack(), update.sequence)

                world.at(world.now, up)

            with host.cpu.used():
                server.follow(version)  # type: ignore[attr-defined]
                if server.judge is None:
                    share = server.share  # type: ignore[attr-defined]
                    server.judge = self.judge(share.assigned, share.heldout, host.cpu)
            server.summed = summed  # type: ignore[attr-defined]
            host.limit = HURRY * version.seconds
            if any(p.there for p in host.peers.values()):
                host.schedule(lambda made: False, once=True)

        peer.answer = answer

    def figures(self, first: float) -> dict[str, Any]:
        """Return the figures of the last rounds, each; bytes and CPU seconds as of ``gpt2-lab``."""
        server = self.top.server
        last, before = self.seen[-1], self.seen[-1 - LAST]
        found: dict[str, Any] = {name: (last[name] - before[name]) / LAST for name in last}
        below = [server, *(h.server for h in self.branches)]
        return found | {
            "values": self.parameters.numel,
            "deadline_s": mean(self.top.deadlines[-LAST:]),
            "samples_s": found["samples"] / found["round_s"],
            "updates": mean(m.updates for m in self.made[-LAST:]),
            "late": self.top.late + sum(h.late for h in self.branches),
            "again": self.pool.counts.again,
            "named": sum(len(s.judge.named) for s in below if isinstance(s.judge, Gauntlet)),
            "loss": [first, self.evaluator.mean(server.weights, self.lesson.heldout[:64])],
        }


def built(shape: tuple[int, int, int]) -> ModelStage:
    """Return a GPT-2 of so many layers, width and heads, of random weights."""
    known = texts().source.config
    own = dict(zip(("n_layer", "n_embd", "n_head"), shape, strict=True))
    source = ModelSource("gpt2-lab", "gpt2", type(known)(**known.to_dict() | own), None, None)
    return build_whole(source, 0, SEED, ON_CPU)


def vocabulary() -> int:
    """Return how many tokens the text's tokenizer knows."""
    return int(texts().source.config.vocab_size)


def of_updates(cell: Cell) -> dict[str, Any]:
    """Return a keeper's CPU seconds for each update of a round, and for a version, at a model's size."""
    torch.set_num_threads(1)
    model = built(LAB if cell.shape == "lab" else LARGE)
    parameters = Parameters(model)
    values = parameters.numel
    sides = Sides.of(parameters.matrices, values) or Sides(0, 0)
    policy, pool = Together(1, sides.total, sides.loose), WorkPool(texts().train, BATCH, SEED)
    server = Server(
        parameters, Synchronous(), policy, DeltaDownload(policy.download(values)), RoundRates(RATE), pool
    )
    evaluator = Evaluator(model, parameters, ON_CPU)
    server.judge = Gauntlet(evaluator.losses, pool.assigned, texts().heldout, SEED, clock=lambda: 0.0)
    member = new_member(
        0, model, SharedBlocks(BATCH, SEQ, vocabulary()), LocalAdamW(), parameters, ON_CPU, SEED
    )
    for client in range(cell.members):  # slow, so that a step is all that they take
        server.join(ClientProfile(client, 100.0, 1 << 20, 1e9, 1e9))
    held: Held | None = None
    found: dict[str, list[float]] = {"issue": [], "receive": [], "close": []}
    for number in range(6):  # the first one warms up
        server.begin(range(cell.members))
        for client in range(cell.members):
            began = process_time()
            version = server.issue(client, held, number)
            found["issue"].append(process_time() - began)
            member.id, member.sequence = client, number
            data = member.train(version, server.given).pack()
            member.residuals.settle(client, version.sequence)
            began = process_time()
            taken = server.receive(client, data)
            took = process_time() - began
            require(isinstance(taken, Accepted), PayloadError, f"an update was refused: {taken}")
            found["close" if client == cell.members - 1 else "receive"].append(took)
        held = server.newest
    began = process_time()
    evaluator.losses(server.weights, texts().heldout[:32])
    block, issue = (process_time() - began) / 32, min(found["issue"])
    receive = min(found["receive"])
    return {"values": values, "issue": issue, "receive": receive, "bytes": len(data), "block": block,
            "close": min(found["close"][1:]) - receive}  # fmt: skip


def measure(cell: Cell) -> dict[str, Any]:
    """Run one cell."""
    return of_updates(cell) if cell.kind == "update" else Swarm(cell).run()


def bounds(line: int) -> dict[str, Any] | None:
    """Return at how many members one keeper's link, or its CPU, takes as long as a round: derived."""
    few, many = (KEPT.get(Cell("keeper", n, line)) for n in (8, 64))
    if not (few and many):
        return None
    most = max(few["up"], few["down"]) / few["updates"]
    each = (many["cpu_s"] - few["cpu_s"]) / (many["updates"] - few["updates"])  # its judge included
    return {
        "line": line,
        "link": line * MBIT * few["round_s"] / most,
        "cpu": (few["round_s"] - few["cpu_s"]) / each + few["updates"],
        "cpu_each": each,
    }


def summary() -> dict[str, Any]:
    """Return a row a cell, and where one keeper ends."""
    rows = [cell._asdict() | (KEPT.get(cell) or {}) for cell in cells()]
    shapes = [s for s, many in UPDATES.items() if all(KEPT.get(Cell("update", n, None, s)) for n in many)]
    each = {shape: costs(shape)._asdict() for shape in shapes}
    return {"rows": rows, "costs": each, "bounds": [x for line in LINES if (x := bounds(line))]}


@tabled("members, simulated", "keeper's link", "a round", "samples/s", "keeper receives, sends a round",
        "its CPU, of the round")  # fmt: skip
def scale(found: dict[str, Any]) -> Rows:
    """How throughput, bytes and CPU grow with members."""
    for r in found["rows"]:
        if "round_s" in r and (r["kind"] == "tree" or r["members"] in (4, 16, 64)):
            tree = f" in {BRANCHES} branches" if r["kind"] == "tree" else ""
            yield [
                f"{r['members']}{tree}",
                f"{r['line']:,} Mbit/s",
                f"{r['round_s']:.1f} s",
                f"{r['samples_s']:.0f}",
                f"{r['up'] / 1e6:.1f}, {r['down'] / 1e6:.1f} MB",
                f"{r['cpu_s']:.1f} s, {r['cpu_s'] / r['round_s']:.0%}",
            ]


TABLES: dict[str, Draw] = {"scale": scale}

if __name__ == "__main__":
    run_study("scale", sys.argv[1:], cells, measure, summary)
