"""A stage behind the first: it passes on all that waits, in one pass; the last one picks tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.links.mailbox import Mailbox
from thinwire.types import PayloadError, ThinwireError, require
from thinwire.uses.serving.drafting.head_drafts import HeadDrafts
from thinwire.uses.serving.ring_messages import (
    Close,
    Open,
    Portion,
    RingKind,
    pack_pass,
    pack_picked,
    unpack_pass,
)
from thinwire.uses.serving.row_pool import TextRows
from thinwire.uses.serving.stage_work import Answers, StageWork

PASSES, PICKS, FAILED = b"P", b"T", b"F"  # tags
TICK = 1.0  # seconds
MOST = 512  # tokens that are put together in one pass


@dataclass(eq=False)
class LaterStage:
    """Stage ``index``: what comes from ``before`` goes to ``after``; the last one answers ``first``.

    ``working``: called about once a second, and raises what ends the stage.
    """

    index: int
    work: StageWork
    before: Mailbox
    first: Mailbox
    after: Mailbox | None = None
    working: Callable[[], object] = lambda: None
    head: HeadDrafts | None = None  # of the last one
    rows: dict[int, TextRows] = field(default_factory=dict)
    _waiting: list[Portion] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answers = Answers(self.work, head=self.head)

    def run(self) -> None:
        """Work until the first stage ends. Errors: ``LinkError`` naming a stage that is lost.

        The first stage is told of any other.
        """
        try:
            while self._turn():
                pass
        except Exception as e:  # any: whoever waits for a text must hear of it
            what = str(e) if isinstance(e, ThinwireError) else f"{type(e).__name__}: {e}"
            self.first.send(FAILED, f"stage {self.index} failed: {what}".encode()[:2000])
            raise

    def _turn(self) -> bool:
        """Do what has come, or wait a moment for it; return whether to go on."""
        data = self.before.look(PASSES, TICK)
        self.working()
        going = True
        while data is not None and going:
            going = self._take(data)
            full = sum(p.segment.many for p in self._waiting) >= MOST
            data = (
                self.before.look(PASSES) if going and not full else None
            )  # behind the end is another ring's
        self._pass_on()
        return going

    def _take(self, data: bytes) -> bool:
        """Take a message; return whether another may follow."""
        kind = data[0] if data else 0
        if kind == RingKind.PASS:
            self._waiting += unpack_pass(data, self.rows, self.work.cache.many)
            return True
        if kind == RingKind.OPEN:
            opened = Open.unpack(data)
            self.rows[opened.request], picking = opened.read()
            self.answers.open(opened.request, picking, opened.read_tail(), opened.tail_at)
            if opened.copied:
                self._pass_on()  # before rows are read, or written over
                self.work.cache.copy(opened.copy, self.rows[opened.request])
        elif kind == RingKind.CLOSE:
            self._close(Close.unpack(data).request)
        else:
            require(kind == RingKind.STOP, PayloadError, f"a message of kind {kind}; update the older end")
        if self.after is not None:
            if kind == RingKind.STOP:
                self._pass_on()
            self.after.send(PASSES, data)
        return kind != RingKind.STOP

    def _close(self, request: int) -> None:
        if any(p.segment.request == request for p in self._waiting):
            self._pass_on()  # before somebody else gets its rows
        self.rows.pop(request, None)
        self.answers.close(request)

    def _pass_on(self) -> None:
        portions, self._waiting = self._waiting, []
        if not portions:
            return
        found = self.work.extend(portions, self.work.decode(portions))
        if self.after is not None:
            self.after.send(PASSES, pack_pass(self.work.code(portions, found)), "activations")
        elif answers := self.answers.of(portions, found):
            self.first.send(PICKS, pack_picked(answers))
