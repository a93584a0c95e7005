"""The links of a stage's process to all others, made anew where one of them was lost."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from thinwire.links.mailbox import Mailbox
from thinwire.runs.ranks.joining import check_options
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World
from thinwire.types import LinkError
from thinwire.uses.serving.later_stage import AGAIN
from thinwire.uses.serving.run.options import StagesConfig
from thinwire.uses.serving.text_engine import RingEnds


@dataclass(eq=False)
class StageRing:
    """This stage's place in ``world``; ``digest``: of the model that all must have."""

    config: StagesConfig
    world: World
    digest: str
    before: int = 0  # bytes over links that are gone

    @property
    def index(self) -> int:
        """This stage, from 0."""
        return self.world.rank

    @property
    def boxes(self) -> dict[int, Mailbox]:
        """The mailboxes of the links to all other stages."""
        return {rank: peer.mailbox for rank, peer in self.world.peers.items()}

    @property
    def ends(self) -> RingEnds:
        """The first stage's links."""
        boxes, last = self.boxes, self.world.size - 1
        return RingEnds(boxes.get(1), boxes.get(last), [boxes[k] for k in range(2, last)])

    def sent(self) -> int:
        """Return the bytes that this stage has sent and received, headers included: of two stages, all."""
        meters = [peer.meter.snapshot() for peer in self.world.peers.values()]
        return self.before + sum(
            t.nbytes for m in meters for way in (m.sent, m.received) for t in way.values()
        )

    def check(self) -> None:
        """Find that all stages have the same options and the same model. Errors: ``InputError``."""
        check_options(self._telemetry(), self.config, contents={"model": self.digest})

    def await_loaded(self) -> None:
        """Wait until all stages have loaded the model. Errors: ``LinkError`` naming one that is late."""
        self._telemetry().agree(b"R", "", "that it has loaded the model")

    def meet_again(self, error: LinkError) -> None:
        """Close all links and make them anew, with a stage that is started again. Say so on stderr.

        Errors: ``LinkError`` where a stage did not come within ``--deadline`` seconds.
        """
        self._tell(f"{error}; waiting up to {self.config.deadline:g} s until all stages are there again")
        if not self.index:
            for peer in self.world.peers.values():
                peer.mailbox.send(AGAIN, b"")
        self.before, end = self.sent(), time.monotonic() + self.config.deadline
        while True:
            try:
                self.world.reconnect()
                self.check()
                self.await_loaded()
            except LinkError:  # another one may have been lost meanwhile
                if time.monotonic() > end:
                    raise
            else:
                break
        self._tell("all stages are there again")

    def _telemetry(self) -> Telemetry:
        return Telemetry(self.world, self.config.deadline)

    def _tell(self, text: str) -> None:
        if not self.config.quiet:
            sys.stderr.write(f"stage {self.index}: {text}\n")
            sys.stderr.flush()
