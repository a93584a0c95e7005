"""A swarm in anybody's training loop: the optimiser's steps are counted, and rounds go on beneath them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.links.hub.spoke import Spoke
from thinwire.rounds.client import Client
from thinwire.rounds.client_profile import ClientPace
from thinwire.rounds.parameters import Parameters
from thinwire.rounds.remote.control_messages import whole
from thinwire.rounds.remote.remote_client import RemoteClient
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import VersionMessage
from thinwire.types import Closing, InputError, LinkError, require

PARTING = 10.0  # seconds for the last word
GUESS = 1.0  # seconds of a step, until one was timed
MOST_SAMPLES = 1 << 30  # of a round, as a member says that it may have; it is told how many it had


@dataclass(frozen=True)
class _Round:
    """A round that begins: its version, and the weights [1, N] to start from."""

    version: VersionMessage
    start: Tensor


class SwarmLoop(Closing):
    """Take part in a swarm with the steps of ``optimizer``; made by ``thinwire.swarm.join``.

    Each step of the optimiser is a local step. After the last one of a round it sends what changed, waits for
    the next version, and goes on from that; the learning rate comes with it, in all parameter groups.
    ``samples``: how many samples a step is of, by which updates count. The optimiser's moments stay.
    Errors: what ended the swarm is raised by the step that finds it; ``LinkError`` names the keeper.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, spoke: Spoke, remote: RemoteClient, samples: int
    ) -> None:
        require(samples >= 1, InputError, f"samples={samples} is below 1; give those of a step")
        self._parameters, self._optimizer, self._spoke = Parameters(model), optimizer, spoke
        self._rounds: queue.Queue[_Round | BaseException | None] = queue.Queue()
        self._changes: queue.Queue[Tensor | None] = queue.Queue()
        self._data = _Steps(samples)
        self.over, self.rounds = False, 0
        terms = remote.terms()
        most = whole(terms, "batch") if "batch" in terms else samples
        wrong = f"samples={samples}, and the keeper counts {most} a step at most; give that or keep(batch=)"
        require(samples <= most, InputError, wrong)
        member = _LoopMember(self, whole(terms, "client"), model, self._data, self._parameters)
        self._thread = threading.Thread(target=self._serve, args=(remote, member), name="swarm", daemon=True)
        self._thread.start()
        self._handle = optimizer.register_step_post_hook(lambda *_: self._stepped())
        self._begin()

    def _serve(self, remote: RemoteClient, member: Client) -> None:
        """Follow the keeper, beside the loop."""
        try:
            remote.serve(member, ClientPace(GUESS))
            self._rounds.put(None)
        except BaseException as e:
            self._rounds.put(e)

    def change(self, version: VersionMessage, start: Tensor) -> Tensor:
        """Return what the loop's steps changed from ``start``; on the thread that follows the keeper."""
        self._data.take(version)
        self._rounds.put(_Round(version, start))
        found = self._changes.get()
        require(found is not None, LinkError, "this member leaves the swarm")
        return found  # type: ignore[return-value]  # that was just seen

    def _begin(self) -> None:
        """Wait for the next round, and start from its version."""
        found = self._rounds.get()
        if isinstance(found, BaseException):
            self._end()
            raise found
        if found is None:
            self._end()
            return
        self._round, self._left = found, found.version.steps
        self._parameters.write(found.start)
        for group in self._optimizer.param_groups:
            group["lr"] = found.version.rate

    @torch.no_grad()
    def _stepped(self) -> None:
        """Count a local step; after the last one of a round, go on to the next."""
        if self.over:
            return
        self._left -= 1
        if self._left <= 0:
            start = self._round.start.to(self._parameters.device)
            self._changes.put(start - self._parameters.row())
            self.rounds += 1
            self._begin()

    def _end(self) -> None:
        self.over = True
        self._handle.remove()

    def close(self) -> None:
        """Leave the swarm, which goes on without this member. Harmless twice."""
        if not self.over:
            self._end()
            self._changes.put(None)  # the thread tells the keeper, so that nobody waits for this member
        self._thread.join(PARTING)
        self._spoke.close()


class _Steps:
    """What an update counts for: the loop's own samples, which nobody sees."""

    def __init__(self, each: int) -> None:
        self._each, self.samples = each, MOST_SAMPLES

    def take(self, version: VersionMessage) -> None:
        self.samples = version.steps * self._each

    def batches(self, steps: int, draw: torch.Generator) -> Iterator[Any]:
        yield from ()


class _LoopMember(Client):
    """A client whose local steps are those of somebody's loop."""

    def __init__(
        self, loop: SwarmLoop, number: int, model: nn.Module, data: _Steps, parameters: Parameters
    ) -> None:
        super().__init__(number, model, data, ClientResiduals(), parameters=parameters)
        self._loop = loop

    @property
    def most_samples(self) -> int:
        return MOST_SAMPLES

    def change(self, version: VersionMessage, start: Tensor) -> Tensor:
        return self._loop.change(version, start)


def join_loop(
    model: nn.Module,
    optimizer: Optimizer,
    address: tuple[str, int],
    token: bytes | None,
    name: str,
    samples: int,
    patience: float,
    noted: Callable[[str], object],
) -> SwarmLoop:
    """Return the loop's part in the swarm of a keeper; see ``thinwire.swarm.join``."""
    spoke = Spoke.connect(*address, token=token)
    try:
        return SwarmLoop(model, optimizer, spoke, RemoteClient(spoke, patience, noted, name), samples)
    except BaseException:
        spoke.close()
        raise
