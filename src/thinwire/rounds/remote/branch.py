"""A branch: for its own clients it is the server, and for the server above it is one client.

Versions come from above and go on as they came, so that all hold the same bits. A round above is a round
here: what its clients changed goes up as one update, of as many samples as theirs were together. What the
codec dropped stays here, as with any client.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from thinwire.rounds.aggregation import Synchronous
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client import Client, PauseError
from thinwire.rounds.client_profile import ClientPace, ClientProfile, FederatedPolicy
from thinwire.rounds.download import PassedDownload, PassedSender
from thinwire.rounds.judging import Judge
from thinwire.rounds.local_training import Decay
from thinwire.rounds.parameters import Parameters
from thinwire.rounds.remote.client_handshake import MOST_MEMBERS
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import Update, VersionMessage
from thinwire.rounds.work import WorkSource
from thinwire.types import LinkError, ThinwireError

HURRY = 0.75  # of the time that the server above waits: when clients are to be done; the rest is the way up
MOST_SAMPLES = 1 << 30  # of a round, as a branch says that it may have; it is told how many it had
STOPPED = -1  # in place of a sequence number: there will be no more rounds
NOBODY = "no update came: nobody is at the branch, or nobody there whom it trusts"


class DividedWork(WorkSource, Protocol):
    """The share of a branch, which it divides among its clients."""

    def take(self, version: VersionMessage) -> None:
        """Begin with the share that came with a version. Errors: ``PayloadError``."""
        ...

    def gaps(self, without: Collection[int]) -> tuple[tuple[int, int], ...]:
        """Return what nobody trained on, what the clients ``without`` did included, as ``Update.left``."""
        ...

    @property
    def given(self) -> int:
        """How many samples the share has."""
        ...

    @property
    def steps(self) -> int:
        """For how many local steps there are samples that nobody has."""
        ...

    @property
    def heldout(self) -> Tensor | None:
        """Samples of the first share that nobody here trains on."""
        ...


class RoundSum(NamedTuple):
    """What the clients of a branch changed together, [1, N], and on how many samples."""

    change: Tensor
    samples: int
    left: tuple[tuple[int, int], ...]


class BranchServer(Server):
    """Give on the versions of the server above; ``summed`` hears what each round came to.

    ``divided``: of the steps that are to be done together, the policy that says who does how many.
    """

    def __init__(
        self,
        model: Tensor | Parameters,
        divided: Callable[[int], FederatedPolicy],
        work: DividedWork,
        judge: Judge | None = None,
    ) -> None:
        super().__init__(model, Synchronous(), divided(1), PassedDownload(), None, work, judge)
        self._divided, self.share = divided, work
        self.summed: Callable[[RoundSum], object] = lambda found: None
        self.there, self._steps = threading.Event(), 1  # set while a client is there

    def join(self, device: ClientProfile) -> None:
        super().join(device)
        self.there.set()

    def leave(self, client: int) -> int | None:
        found = super().leave(client)
        if not self.clients:
            self.there.clear()
        return found

    @property
    def most_asked(self) -> int:
        """Return the steps of the round: each that is asked takes one at least."""
        return self._steps

    @property
    def passed(self) -> PassedSender:
        """What follows the server above."""
        return self._sender  # type: ignore[return-value]  # as its download opened it

    def hold(self, version: VersionMessage) -> None:
        """Take a version from above, with which no round comes. Errors: as below."""
        self.passed.follow(version)
        self.weights, self.version, self._waiting = self._sender.given, version.number, {}

    def follow(self, version: VersionMessage) -> None:
        """Take a version from above, and the steps and samples that came with it; no round is open.

        Errors: ``PayloadError`` or ``DesyncError``; then the next version comes whole.
        """
        self.hold(version)
        self.share.take(version)
        self._steps, self._assigned = self.share.steps, None
        self.rates, self.policy = Decay(version.rate), self._divided(self._steps)
        self._end()

    def _make(self, change: Tensor) -> int:
        """Give up what the updates together come to; the version of it is made above."""
        doubted = {c for c in self._waiting if c in self.verdicts and not self.verdicts[c].trust}
        left = self.share.gaps(doubted)
        samples = self.share.given - sum(many for _, many in left)
        self._waiting = {}
        self._end()
        self.summed(RoundSum(change.float(), samples, left))
        return self.version + 1


class Branch(Client):
    """The client that a branch is for the server above: its local steps are a round of ``server``.

    ``train`` is called where the server above is listened to, and waits for the round; ``ready`` is called
    where the clients are, between two rounds. ``planned``: how fast clients are together.
    """

    def __init__(
        self,
        model: nn.Module,
        server: BranchServer,
        parameters: Parameters,
        planned: Callable[[Sequence[ClientProfile]], ClientPace],
    ) -> None:
        super().__init__(
            0, model, _Behind(), ClientResiduals(), parameters=parameters, copy=server.passed.copy
        )
        self.server, self.begun = server, threading.Event()  # set once the clients are gathered
        server.summed, self._planned = self._answer, planned
        self._lock = threading.Lock()
        self._coming: VersionMessage | None = None  # not begun yet
        self._ahead: VersionMessage | None = None  # not held yet
        self._current: VersionMessage | None = None  # the round's
        self._began = 0.0  # the round, monotonic
        self._ended: BaseException | None = None
        self.over = False
        self._found: queue.Queue[tuple[int, RoundSum | ThinwireError | None]] = queue.Queue()

    def pace(self, seconds: float = 0.0, steps: int = 1) -> ClientPace:
        """Return how fast its clients are together, and what a turn takes beside that."""
        planned = self._planned([self.server.device(c) for c in self.server.clients])
        more = seconds - planned.fixed - max(steps, planned.least) * planned.step_seconds
        many = min(planned.members, MOST_MEMBERS)
        return planned._replace(fixed=planned.fixed + max(0.0, more), members=many)

    @property
    def most_samples(self) -> int:
        """Return more than any round has; each is told how many it has."""
        return MOST_SAMPLES

    # -- on the thread that listens to the server above ----------------------------------------------------

    def follow(self, version: VersionMessage) -> None:
        """Have a version held before the first round, or the next one."""
        with self._lock:
            self._ahead = version

    def train(self, version: VersionMessage, start: Tensor | None = None) -> Update:
        """Return what a round of the clients came to. Errors: ``PauseError`` where it came to nothing."""
        self._check_new(version)
        found = self._ask(version)
        if isinstance(found, ThinwireError):
            raise found
        if found is None or not found.samples:
            raise PauseError(NOBODY, self.server.there.is_set)
        update = self.answer(version, found.change)
        steps = max(1, version.steps * found.samples // self.server.share.given)
        return replace(update, samples=found.samples, steps=steps, left=found.left)

    def _ask(self, version: VersionMessage) -> RoundSum | ThinwireError | None:
        with self._lock:
            self._coming = version
        end = time.monotonic() + version.seconds
        try:
            while True:
                left = max(0.0, end - time.monotonic()) if version.seconds else None
                number, found = self._found.get(timeout=left)
                if number in (version.sequence, STOPPED):
                    return found
        except queue.Empty:
            return None
        finally:
            with self._lock:
                self._coming = None

    def stop(self) -> None:
        """Take part no longer: the server above is told at the next version, or at once in a round."""
        self._found.put((STOPPED, LinkError("the branch has ended")))

    def close(self, error: BaseException | None = None) -> None:
        """Say that nothing more will come from above: it is over, or why."""
        self._ended, self.over = error, error is None

    # -- on the thread of the clients ----------------------------------------------------------------------

    def is_over(self) -> bool:
        """Return whether the server above has ended. Errors: why nothing more will come from it."""
        if self._ended is not None:
            raise self._ended
        return self.over

    def ready(self) -> bool:
        """Return whether a round begins: whether a version has come."""
        self.begun.set()
        self._answer(None)  # to a round that nobody answered
        with self._lock:
            (ahead, version), self._ahead, self._coming = (self._ahead, self._coming), None, None
        self._current, self._began = version, time.monotonic()
        try:
            if ahead is not None:
                self.server.hold(ahead)
            if version is None:
                return False
            self.server.follow(version)
        except ThinwireError as e:
            self._answer(e)
            return False
        return True

    def seconds(self) -> float:
        """Return the longest that the round that begins may take."""
        known = self._current is not None and self._current.seconds
        return HURRY * self._current.seconds if known and self._current else float("inf")

    def _answer(self, found: RoundSum | ThinwireError | None) -> None:
        version, self._current = self._current, None
        if version is not None:
            self._found.put((version.sequence, found))


class _Behind:
    """The data of a branch: those of its clients."""

    samples = 0

    def batches(self, steps: int, draw: Any) -> Any:
        return iter(())
