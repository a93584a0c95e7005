"""One rank of a run whose model has experts: it makes its share of the pictures, in one batch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from thinwire.runs.data.images import CLASSES
from thinwire.uses.pictures.context_parallel.tally import Tally
from thinwire.uses.pictures.expert_parallel.recipes import schedule_of, spread_experts
from thinwire.uses.pictures.expert_parallel.schedule import EXCHANGING
from thinwire.uses.pictures.run import flux_fashion_moe
from thinwire.uses.pictures.run.options import ONE
from thinwire.uses.pictures.run.run import TRIED, PicturesRank, Timing
from thinwire.uses.pictures.run.sampling import OnStep, sample_batch

PLAIN = "ep-sync"  # what a record's bytes of float16 are measured with


class ExpertsRank(PicturesRank):
    """What one rank does. Nothing is predicted: no way but one machine's has the model on one rank."""

    def _built(self) -> nn.Module:
        module = flux_fashion_moe
        return module.build(self.config.seed) if self.config.init else module.load()

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

    def _sampled(self, seeds: list[int], tally: Tally, way: str = "", steps: int = 0) -> Timing:
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
