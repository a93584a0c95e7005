"""A text to be continued: what is asked, how far it is, and what whoever asked hears."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from thinwire.types import InputError, LinkError, ThinwireError, require
from thinwire.uses.serving.choosing.draft_tree import DraftTree
from thinwire.uses.serving.choosing.rank_shares import RankShares
from thinwire.uses.serving.row_pool import TextRows
from thinwire.uses.serving.token_picking import Picking

STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"  # why a text ends
PATIENCE = 600.0  # seconds without a token
Said = list[int] | str | ThinwireError  # tokens, why a text ended, or what went wrong


class FullError(ThinwireError):
    """Too many texts wait already; one that is asked for later may not."""


@dataclass(frozen=True)
class TextRequest:
    """Tokens to go on from, at most ``most`` more of them, up to any of ``ends``; ``drafts``: allow them."""

    prompt: tuple[int, ...]
    most: int
    picking: Picking = field(default_factory=Picking)
    ends: frozenset[int] = frozenset()
    drafts: bool = True

    def __post_init__(self) -> None:
        require(len(self.prompt) > 0, InputError, "an empty prompt; give at least one token")
        require(self.most > 0, InputError, f"{self.most} tokens are asked for; ask for one at least")


@dataclass
class TextTimes:
    """When it came, began, had its first token and its last; seconds of the monotonic clock."""

    came: float = field(default_factory=time.monotonic)
    began: float = 0.0
    first: float = 0.0
    last: float = 0.0


@dataclass(eq=False)
class Text:
    """A request on its way. Iterate over it for the tokens, in lists as they come, unless ``told`` gets them.

    ``told`` is called by the engine's thread, with tokens and at last with the reason of the end.
    Errors while iterating: ``ThinwireError`` where the stages cannot go on, ``LinkError`` after ``PATIENCE``.
    """

    number: int
    request: TextRequest
    made: list[int] = field(default_factory=list)
    reason: str = ""  # of its end
    times: TextTimes = field(default_factory=TextTimes)
    rounds: int = 0  # trips around the ring that gave tokens
    drafted: int = 0
    accepted: int = 0
    reused: int = 0  # tokens of its prompt that were not computed
    told: Callable[[Said], object] | None = None
    _said: queue.SimpleQueue[Said] = field(default_factory=queue.SimpleQueue)

    # What the first stage knows of it, and nobody else touches.
    rows: TextRows | None = None
    start: int = 0  # tokens that were known when the stages began with it
    stored: int = 0  # blocks of its prompt that all stages have found on disk
    saved: bool = False  # whether the others were given to be stored
    sent: int = 0  # tokens whose keys and values are on their way or there
    asked: float = 0.0  # when the tokens that are awaited were asked for
    sent_drafts: tuple[int, ...] = ()  # in that
    sent_tree: DraftTree = field(default_factory=DraftTree)
    ahead: DraftTree = field(default_factory=DraftTree)  # what is to be proposed for the next round
    proposed: tuple[int, ...] = ()  # what it did
    kept: tuple[int, ...] = ()  # places in its rows of the drafts that were right, if not behind each other
    shares: RankShares = field(default_factory=RankShares)

    def __post_init__(self) -> None:
        self.rewind()

    def rewind(self) -> None:
        """Begin again with what is known by now: no stage has anything of it any more."""
        self.rows, self.start, self.sent = None, self.length, 0
        self.sent_drafts, self.proposed, self.kept = (), (), ()
        self.sent_tree = self.ahead = DraftTree()

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            try:
                said = self._said.get(timeout=PATIENCE)
            except queue.Empty:
                raise LinkError(f"no token came for {PATIENCE:g} s; see whether the stages run") from None
            if isinstance(said, ThinwireError):
                raise said
            if isinstance(said, str):
                return
            yield said

    def wait(self) -> list[int]:
        """Return all tokens, once they are there."""
        return [token for some in self for token in some]

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.request.prompt) + len(self.made)

    def piece(self, at: int, many: int) -> list[int]:
        """Return ``many`` tokens of prompt and answer from position ``at`` on."""
        prompt = len(self.request.prompt)
        if at >= prompt:
            return self.made[at - prompt : at - prompt + many]
        found = list(self.request.prompt[at : at + many])
        return found + self.made[: many - len(found)]

    def take(self, tokens: list[int]) -> list[int]:
        """Add tokens up to where it ends, and return those; ``say`` tells whoever asked."""
        self.times.last = time.monotonic()
        self.times.first = self.times.first or self.times.last
        new = tokens[: self.request.most - len(self.made)]
        end = next((i for i, token in enumerate(new) if token in self.request.ends), None)
        new = new[:end]
        self.made += new
        if end is not None:
            self.reason = STOP
        elif len(self.made) >= self.request.most:
            self.reason = LENGTH
        return new

    def way_of(self, tokens: Sequence[int]) -> list[int]:
        """Return which of the drafts that were sent are right, by the tokens that were picked."""
        found, node = list[int](), -1
        nodes = list(zip(self.sent_drafts, self.sent_tree.parents, strict=True))
        for token in tokens[:-1]:
            node = nodes.index((token, node))
            found.append(node)
        return found

    def keep(self, way: Sequence[int], proposed: tuple[int, ...]) -> None:
        """Remember what was right, and what is proposed for the next round."""
        self.proposed = proposed
        first = self.length  # the place of the first draft: the newest token was before it
        self.kept = () if list(way) == list(range(len(way))) else tuple(first + node for node in way)

    def say(self, new: list[int]) -> None:
        """Tell whoever asked of new tokens, and of the end."""
        if new:
            self._tell(new)
        if self.reason:
            self._tell(self.reason)

    def fail(self, error: ThinwireError) -> None:
        """End it by an error."""
        self.reason = self.reason or "error"
        self._tell(error)

    def cancel(self) -> None:
        """End it because nobody wants it any more; ``say`` tells whoever asked."""
        self.reason = self.reason or CANCELLED

    def _tell(self, said: Said) -> None:
        (self.told or self._said.put)(said)
