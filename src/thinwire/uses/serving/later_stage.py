"""A stage behind the first: it passes on all that waits, in one pass; the last one picks tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.links.mailbox import Mailbox
from thinwire.types import LinkError, PayloadError, ThinwireError, require
from thinwire.uses.serving.drafting.head_drafts import HeadDrafts
from thinwire.uses.serving.ring_messages import (
    Close,
    Open,
    Portion,
    RingKind,
    Save,
    Seek,
    Sought,
    pack_pass,
    pack_picked,
    unpack_pass,
)
from thinwire.uses.serving.row_pool import TextRows
from thinwire.uses.serving.stage_work import Answers, StageWork
from thinwire.uses.serving.stored_blocks import StoredBlocks

PASSES, PICKS, FOUND = b"P", b"T", b"B"  # tags
FAILED, LOST, AGAIN = b"F", b"L", b"A"  # a stage failed; lost another one; all are to meet again
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
    stored: StoredBlocks | None = None
    rows: dict[int, TextRows] = field(default_factory=dict)
    _waiting: list[Portion] = field(default_factory=list)
    _again: bool = False

    def __post_init__(self) -> None:
        self.answers = Answers(self.work, head=self.head)
        self.first.on(AGAIN, lambda *_: self._begin_again())

    def run(self) -> None:
        """Work until the first stage ends. Errors: ``LinkError`` naming a stage that is lost.

        The first stage is told of any other.
        """
        try:
            while self._turn():
                pass
        except Exception as e:  # any: whoever waits for a text must hear of it
            what = str(e) if isinstance(e, ThinwireError) else f"{type(e).__name__}: {e}"
            tag, how = (LOST, "has lost another one") if isinstance(e, LinkError) else (FAILED, "failed")
            self.first.send(tag, f"stage {self.index} {how}: {what}".encode()[:2000])
            raise

    def _begin_again(self) -> None:
        self._again = True

    def _turn(self) -> bool:
        """Do what has come, or wait a moment for it; return whether to go on."""
        data = self.before.look(PASSES, TICK)
        require(not self._again, LinkError, "the first stage begins again, because one was lost")
        self.working()
        going = True
        while data is not None and going:
            going = self._take(data)
            full = sum(p.segment.many for p in self._waiting) >= MOST
            more = going and not full  # behind the end is another ring's
            data = self.before.look(PASSES) if more else None
        self._pass_on()
        return going

    def _take(self, data: bytes) -> bool:
        """Take a message; return whether another may follow."""
        kind = data[0] if data else 0
        if kind == RingKind.PASS:
            self._waiting += unpack_pass(data, self.rows, self.work.cache.many)
            return True
        if kind == RingKind.OPEN:
            self._open(Open.unpack(data))
        elif kind == RingKind.SEEK:
            return self._seek(Seek.unpack(data))
        elif kind == RingKind.SAVE:
            self._save(Save.unpack(data))
        elif kind == RingKind.CLOSE:
            self._close(Close.unpack(data).request)
        else:
            require(kind == RingKind.STOP, PayloadError, f"a message of kind {kind}; update the older end")
        if self.after is not None:
            if kind == RingKind.STOP:
                self._pass_on()
            self.after.send(PASSES, data)
        return kind != RingKind.STOP

    def _open(self, opened: Open) -> None:
        rows, picking = opened.read()
        self.rows[opened.request] = rows
        self.answers.open(opened.request, picking, opened.read_tail(), opened.tail_at)
        if opened.copied:
            self._pass_on()  # before rows are read, or written over
            self.work.cache.copy(opened.copy, rows)
        if self.stored is not None:
            self.stored.place(opened.request, opened.stored, self.work.cache, rows)

    def _seek(self, asked: Seek) -> bool:
        """Read stored blocks, and pass on the names of those that were found."""
        names = asked.split()
        found = self.stored.seek(asked.request, names) if self.stored is not None else 0
        if self.after is None:
            self.first.send(FOUND, Sought(asked.request, found).pack())
        else:
            self.after.send(PASSES, Seek(asked.request, b"".join(names[:found])).pack())
        return True

    def _save(self, asked: Save) -> None:
        self._pass_on()  # or they are not computed
        rows = self.rows.get(asked.request)
        if self.stored is not None and rows is not None:
            self.stored.save(asked.split(), asked.first, self.work.cache, rows)

    def _close(self, request: int) -> None:
        if any(p.segment.request == request for p in self._waiting):
            self._pass_on()  # before somebody else gets its rows
        self.rows.pop(request, None)
        self.answers.close(request)
        if self.stored is not None:
            self.stored.forget(request)

    def _pass_on(self) -> None:
        portions, self._waiting = self._waiting, []
        if not portions:
            return
        found = self.work.extend(portions, self.work.decode(portions))
        if self.after is not None:
            self.after.send(PASSES, pack_pass(self.work.code(portions, found)), "activations")
        elif answers := self.answers.of(portions, found):
            self.first.send(PICKS, pack_picked(answers))
