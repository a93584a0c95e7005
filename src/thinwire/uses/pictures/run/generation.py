"""Make pictures in several ways, all in turn: start the ranks, and what each of them does."""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thinwire.runs.data.fashion import CLASSES
from thinwire.runs.machine import devices
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.machine.processor import keep_freed, pick_threads
from thinwire.runs.ranks.joining import check_options, joined
from thinwire.runs.ranks.launcher import launcher_of
from thinwire.runs.ranks.rendezvous import starts_all
from thinwire.runs.ranks.supervise import Workers
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World
from thinwire.runs.records.writer import RUN
from thinwire.types import InputError, ThinwireError
from thinwire.uses.pictures.absent_block import PIPE
from thinwire.uses.pictures.coding import FP16, Coding
from thinwire.uses.pictures.context_parallel.parallel import over_ranks
from thinwire.uses.pictures.context_parallel.recipes import division_of, parallel
from thinwire.uses.pictures.expert_parallel.recipes import schedule_of, spread_experts
from thinwire.uses.pictures.expert_parallel.routing import EXCHANGING
from thinwire.uses.pictures.messages import ExchangeTally
from thinwire.uses.pictures.run import flux_fashion, flux_fashion_moe, predict, rank_memory
from thinwire.uses.pictures.run.options import AUTO, BATCH, EXPERTS, FLUX, ONE, WAN, PicturesConfig
from thinwire.uses.pictures.run.recording import TimedWay, folder_of, write_records
from thinwire.uses.pictures.run.sheets import OnStep, sample, sample_batch
from thinwire.uses.pictures.run.video import wan_fashion
from thinwire.uses.pictures.run.video.clips import sample_clip

PROGRAM = "thinwire.uses.pictures.run.generation:run_rank"


def launch(config: PicturesConfig) -> list[Path]:
    """Make the pictures, and return the folder of each way, in the order asked.

    Errors: what the first failing rank raised; ``LinkError`` naming a rank that died. Nothing
    is recorded then.
    """
    folders = [folder_of(config, name) for name in config.ways]
    alone = starts_all(config)
    if alone or os.environ["RANK"] == "0":
        for folder in folders:  # what an earlier run left must not pass for this one's
            (folder / RUN).unlink(missing_ok=True)
            for picture in folder.glob("picture*.png"):
                picture.unlink()
    if alone:
        with stopped_by_signals(), launcher_of(config) as place:
            with Workers(place, PROGRAM) as ranks:
                ranks.run(config)
            place.book(*folders)
    else:
        run_rank(config)
    return folders


def run_rank(config: PicturesConfig) -> None:
    """Run this process's rank of ``config``; rank 0 writes the records once all is done."""
    keep_freed()
    torch.set_num_threads(pick_threads(config))
    device = devices.own(config.device)
    with joined(config, "these pictures", "--ranks") as world:
        RANKS[config.model](config, world, device).go()


EXCHANGE = "exchange"  # the label of what the engine sends
TRIED = 2  # steps by which a mode's messages are known


@dataclass
class Timing:
    """One way once, on one rank: seconds, and bytes handed to TCP."""

    seconds: float = 0.0
    steps: list[float] = field(default_factory=list)
    nbytes: int = 0
    first: int = 0
    last: int = 0
    control: int = 0
    tally: dict[str, float] = field(default_factory=dict)
    digest: str = ""
    memory: list[int] = field(default_factory=list)


class PicturesRank:
    """What one rank does: it measures, predicts, and takes part in each way."""

    module: ClassVar[ModuleType] = flux_fashion  # that builds the model, or loads it
    sampled_by: ClassVar[Callable[..., Tensor]] = staticmethod(sample)

    def __init__(self, config: PicturesConfig, world: World, device: torch.device) -> None:
        self.config, self.world = config, world
        self.sheet: Any = config.scene  # what is made: a sheet, or a clip
        self.telemetry = Telemetry(world, config.deadline)
        self.device, self.dtype = device, devices.compute_dtype(config.dtype, device)
        self.model = nn.Module.to(self._built(), device, self.dtype)  # diffusers' own warns of any dtype
        self.pictures: dict[str, list[Tensor]] = {}  # latents by way, on rank 0
        self._halves: dict[str, tuple[int, int]] = {}  # bytes of a first and a later step as float16, by mode

    def _built(self) -> nn.Module:
        made: nn.Module = self.module.build(self.config.seed) if self.config.init else self.module.load()
        return made

    def go(self) -> None:
        """Make all pictures in all ways."""
        check_options(self.telemetry, self.config)
        names, predicted = self._plan()
        repeats: dict[str, list[list[Timing]]] = {name: [] for name in names}
        if ONE not in names.values():
            self._make_references()
        for _ in range(self.config.repeat):
            for name, way in names.items():
                repeats[name].append(self._once(way))
        facts = self.telemetry.gather(b"D", devices.facts(self.device), "its device")
        if self.world.rank == 0:
            made = [self._made(name, way, repeats[name], predicted) for name, way in names.items()]
            write_records(self.config, self.world, made, facts or [], self.device)
        self.telemetry.agree(b"E", "", "its end")

    def _plan(self) -> tuple[dict[str, str], dict[str, float]]:
        """Return which recipe each name runs, and the seconds predicted for each recipe."""
        ways = self.config.ways
        chosen_from = predict.candidates(self.config) if AUTO in ways else []
        asked = [name for name in ways if name != AUTO]
        weighed = list(dict.fromkeys([*asked, *chosen_from, ONE]))
        crossings = self._crossings(weighed, {division_of(name).mode for name in asked})
        sends = {name: division_of(name).mode for name in weighed}
        if self.world.peers:
            weighed = [name for name in weighed if sends[name] in (*crossings, ONE, BATCH)]
        chosen_from = [name for name in chosen_from if name in weighed]
        machine = self._machine()
        seconds = {
            name: self._steps * predict.step_seconds(name, self.config, machine, crossings)
            for name in weighed
        }
        seconds = self.telemetry.spread(b"P", seconds, "what is predicted")
        names = predict.resolved(ways, chosen_from, seconds)
        self._tell(predict.verdict(seconds))
        if AUTO in names:
            self._tell(f"auto takes {names[AUTO]}: {seconds[names[AUTO]]:.2g} s are predicted")
        return names, seconds

    def _tell(self, text: str | None) -> None:
        if text and self.world.rank == 0 and not (self.config.quiet or self.config.json):
            sys.stderr.write(f"{text}\n")

    def _machine(self) -> predict.ForwardAndLink:
        """Measure one forward on rank 0 while the others wait, and every link."""
        seconds = self._forwards(TRIED) if self.world.rank == 0 else 0.0
        self.telemetry.agree(b"F", "", "a forward pass")
        for peer in self.world.peers.values():
            peer.measure()
        found = [peer.reliable.estimate() for peer in self.world.peers.values()]
        rate = min((e.rate for e in found if e.rate), default=1e12)
        delay = max((e.rtt or 0.0 for e in found), default=0.0) / 2
        return predict.ForwardAndLink(seconds, rate, delay)

    def _forwards(self, many: int) -> float:
        times = list[float]()
        for _ in range(many):
            start = perf_counter()
            self.sampled_by(self.model, self.sheet, 1, self.config.seed)
            times.append(perf_counter() - start)
        return min(times)

    def _crossings(self, names: Iterable[str], asked: set[str]) -> dict[str, predict.StepTraffic]:
        """Return what each mode among the recipes sends in a step, as float16.

        One that cannot divide this model over so many ranks is left out, unless it was asked for.
        """
        found: dict[str, predict.StepTraffic] = {}
        half = Coding(FP16)
        for name in names:
            division = division_of(name)
            mode = division.mode
            if mode in (ONE, BATCH) or mode in found or not self.world.peers:
                continue
            before = self._sent()
            try:
                with over_ranks(
                    self.model, self.world.peers, half, half, division, self.config.deadline
                ) as p:
                    timing = self._sampled([self.config.seed], p.tally, steps=TRIED)
            except InputError:
                if mode in asked:
                    raise
                continue
            parts = self.telemetry.agree(b"X", [timing.last, self._sent()[0] - before[0]], "what it sent")
            last, total = max(parts)
            share = p.tally.output_nbytes / max(1, p.tally.nbytes)
            found[mode] = predict.StepTraffic(last, last * share, p.tally.exchanges / TRIED)
            self._halves[mode] = total - last, last
        return found

    def _make_references(self) -> None:
        """Make the pictures on rank 0 alone, while the others wait."""
        if self.world.rank == 0:
            seeds = self._seeds()
            self.pictures[ONE] = self._drawn(seeds, self.config.steps, lambda step: self.telemetry.working())
        self.telemetry.agree(b"R", "", "the pictures of one device")

    def _seeds(self) -> list[int]:
        return [self.config.seed + k for k in range(self.config.pictures)]

    def _drawn(self, seeds: list[int], steps: int, done: OnStep) -> list[Tensor]:
        """Return the latents of the pictures of these seeds."""
        guidance = self.config.guidance
        return [self.sampled_by(self.model, self.sheet, steps, seed, guidance, done) for seed in seeds]

    def _mode(self, way: str) -> str:
        return division_of(way).mode

    def _apart(self, mode: str) -> bool:
        """Return whether the ranks make pictures of their own."""
        return mode == BATCH

    def _entered(self, way: str) -> AbstractContextManager[Any]:
        return parallel(self.model, self.world.peers, way, deadline=self.config.deadline)

    @property
    def _steps(self) -> int:
        """Steps of all pictures, one after another."""
        return self.config.steps * self.config.pictures

    def _once(self, way: str) -> list[Timing]:
        """Make all pictures in one way; return what it took, by rank."""
        self.telemetry.agree(b"B", way, "the next way")
        mode, peers = self._mode(way), self.world.peers
        rank_memory.forget(self.device)
        with ExitStack() as stack:
            alone = mode == ONE or not peers
            tally = ExchangeTally()
            if not alone:
                tally = stack.enter_context(self._entered(way)).tally
            seeds = self._seeds()
            mine = seeds[self.world.rank :: self.world.size] if self._apart(mode) and peers else seeds
            timing = Timing() if alone and self.world.rank else self._sampled(mine, tally, way)
            timing.memory = rank_memory.taken(self.model, self.device)
        found = self.telemetry.agree(b"T", asdict(timing), "what it took")
        timings = [Timing(**one) for one in found]
        apart = self._apart(mode)
        if apart and not alone:
            self._collect(way)
        if mode != ONE and not apart and len({t.digest for t in timings}) > 1:
            raise ThinwireError(
                f"the ranks hold other pictures after {way}; that is a fault, please report it"
            )
        return timings

    def _collect(self, way: str) -> None:
        """Put the pictures that the ranks made apart in order on rank 0."""
        own = [b64encode(x.numpy().tobytes()).decode() for x in self.pictures[way]]
        found = self.telemetry.gather(b"L", own, "its pictures")
        for k in range(self.config.pictures if found else 0):
            data = bytearray(b64decode(found[k % self.world.size][k // self.world.size]))  # type: ignore[index]
            made = torch.frombuffer(data, dtype=torch.float32)
            self.pictures[way][k:] = [made.view_as(self.pictures[way][0])]

    def _sampled(self, seeds: list[int], tally: ExchangeTally, way: str = "", steps: int = 0) -> Timing:
        timing, sent = Timing(), [self._sent()]
        start = before = perf_counter()

        def done(step: int) -> None:
            nonlocal before
            now = perf_counter()
            timing.steps.append(now - before)
            before = now
            sent.append(self._sent())
            if way == ONE:
                self.telemetry.working()

        made = self._drawn(seeds, steps or self.config.steps, done)
        timing.seconds = perf_counter() - start
        totals = [sum(both) for both in sent]
        timing.nbytes = totals[-1] - totals[0]
        if len(totals) > 1:
            timing.first, timing.last = totals[1] - totals[0], totals[-1] - totals[-2]
        timing.control = sent[-1][1] - sent[0][1]
        timing.tally = asdict(tally)
        timing.digest = hashlib.blake2b(
            b"".join(x.numpy().tobytes() for x in made), digest_size=16
        ).hexdigest()
        if way:
            self.pictures[way] = made
        return timing

    def _sent(self) -> tuple[int, int]:
        """Return the bytes that this rank has sent: by the engine, and all else."""
        sent = [peer.meter.snapshot().sent for peer in self.world.peers.values()]
        parts = [(label, t.nbytes) for labels in sent for label, t in labels.items()]
        exchanged = sum(n for label, n in parts if label == EXCHANGE)
        return exchanged, sum(n for _, n in parts) - exchanged

    def _made(
        self, name: str, way: str, repeats: list[list[Timing]], predicted: dict[str, float]
    ) -> TimedWay:
        """Return what a record is made of."""
        mode = self._mode(way)
        middle = sorted(repeats, key=lambda ranks: max(t.seconds for t in ranks))[len(repeats) // 2]
        most = max(middle, key=lambda t: t.nbytes)
        first, later = self._halves.get(mode, (0, 0))
        return TimedWay(
            name=name,
            way=way,
            mode=mode if self.world.peers else ONE,
            repeats=[(max(t.seconds for t in ranks), ranks[0].steps, ranks[0].tally) for ranks in repeats],
            seconds=statistics.median(max(t.seconds for t in ranks) for ranks in repeats),
            nbytes={
                "total": most.nbytes,
                "first_step": most.first,
                "steady_step": most.last,
                "fp16_total": first + (self._steps - 1) * later,
                "fp16_step": later,
                "output": int(most.tally.get("output_nbytes", 0)),
                "control": most.control,
            },
            tally=middle[0].tally,
            steps=middle[0].steps,
            images=[self.sheet.image(x) for x in self.pictures[way]],
            references=[self.sheet.image(x) for x in self.pictures[ONE]],
            memory=rank_memory.most([[t.memory for t in ranks] for ranks in repeats]),
            predicted=predicted.get(way),
            predictions=predicted if name == AUTO else {},
        )


PLAIN = "ep-sync"  # what a record's bytes of float16 are measured with


class ExpertsRank(PicturesRank):
    """What one rank does. Nothing is predicted: no way but one machine's has the model on one rank."""

    module: ClassVar[ModuleType] = flux_fashion_moe

    def _plan(self) -> tuple[dict[str, str], dict[str, float]]:
        """Measure what two steps as float16 send; return the ways as they were asked for."""
        if self.world.peers and any(self._mode(way) in EXCHANGING for way in self.config.ways):
            own = self._seeds()[self.world.rank :: self.world.size]
            before = self._sent()[0]
            with self._entered(PLAIN) as spread:
                timing = self._sampled(own, spread.tally, steps=TRIED)
            sent = [timing.last, self._sent()[0] - before]
            last, total = max(self.telemetry.agree(b"X", sent, "what it sent"))
            self._halves = dict.fromkeys(EXCHANGING, (total - last, last))
        return {name: name for name in self.config.ways}, {}

    def _drawn(self, seeds: list[int], steps: int, done: OnStep) -> list[Tensor]:
        classes, guidance = [self._classes(seed) for seed in seeds], self.config.guidance
        return list(sample_batch(self.model, self.sheet, classes, seeds, steps, guidance, done)[:, None])

    def _sampled(self, seeds: list[int], tally: ExchangeTally, way: str = "", steps: int = 0) -> Timing:
        """Measure as for any picture; a later step is the mean one, because not all send alike."""
        timing = super()._sampled(seeds, tally, way, steps)
        later = (steps or self._steps) - 1
        timing.last = (timing.nbytes - timing.first) // later if later else timing.first
        return timing

    def _classes(self, seed: int) -> tuple[int, ...]:
        """Return the classes of a picture: one garment is of each class in turn, unless any is named."""
        alone = self.sheet.garments == 1 and not self.config.classes
        return (seed % CLASSES,) if alone else self.sheet.classes

    def _mode(self, way: str) -> str:
        return schedule_of(way).mode

    def _apart(self, mode: str) -> bool:
        return mode != ONE

    def _entered(self, way: str) -> AbstractContextManager[Any]:
        return spread_experts(self.model, self.world.peers, way, deadline=self.config.deadline)

    @property
    def _steps(self) -> int:
        return self.config.steps


class ClipsRank(PicturesRank):
    """What one rank does for clips, which are pictures whose samples are whole videos."""

    module: ClassVar[ModuleType] = wan_fashion
    sampled_by: ClassVar[Callable[..., Tensor]] = staticmethod(sample_clip)

    @contextmanager
    def _entered(self, way: str) -> Iterator[Any]:
        """In mode pipe have this rank's blocks alone, as on a machine that holds no more."""
        divided = self._mode(way) == PIPE and not self.config.init
        if divided:
            del self.model
            part = wan_fashion.load_own_blocks(self.world.peers)
            self.model = nn.Module.to(part, self.device, self.dtype)
        with super()._entered(way) as entered:
            yield entered
        if divided:
            self.model = nn.Module.to(self._built(), self.device, self.dtype)


RANKS: dict[str, type[PicturesRank]] = {FLUX: PicturesRank, EXPERTS: ExpertsRank, WAN: ClipsRank}
