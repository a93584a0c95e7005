"""The first stage: it begins requests, sends their tokens around the ring, and drafts while they travel."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.links.mailbox import Mailbox
from thinwire.types import Closing, LinkError, PayloadError, ThinwireError, require
from thinwire.uses.serving.choosing.draft_length import DraftSite, FewestSeconds
from thinwire.uses.serving.choosing.draft_tree import MOST as MOST_DRAFTS
from thinwire.uses.serving.choosing.draft_tree import DraftTree, best_tree
from thinwire.uses.serving.drafting.head_drafts import HeadDrafts
from thinwire.uses.serving.drafts import Drafter
from thinwire.uses.serving.later_stage import FAILED, FOUND, LOST, PASSES, PICKS
from thinwire.uses.serving.prefix_reuse import HeldText, KeptTexts
from thinwire.uses.serving.ring_messages import (
    NO_DRAFTS,
    STOP,
    Close,
    Open,
    Picked,
    Portion,
    Save,
    Seek,
    Sought,
    pack_pass,
    unpack_picked,
)
from thinwire.uses.serving.ring_times import RingTimes
from thinwire.uses.serving.row_pool import NO_COPY, RowCopy, TextRows, TextSegment
from thinwire.uses.serving.stage_work import PROMPT, Answers, StageWork
from thinwire.uses.serving.stored_blocks import BLOCK, StoredBlocks, chain
from thinwire.uses.serving.text_requests import FullError, Said, Text, TextRequest

CHUNK = 128  # tokens of a prompt that pass the stages together
TICK = 1.0  # seconds
QUEUED = 1024  # requests that may wait for rows


class RingEnds(NamedTuple):
    """The first stage's links: to the next stage, from the last one, and from those between."""

    after: Mailbox | None = None
    last: Mailbox | None = None
    between: Sequence[Mailbox] = ()


@dataclass(eq=False)
class TextEngine(Closing):
    """Continue texts by stages, many at once.

    ``work``: the first stage, and the only one where ``after`` is None; ``after``: to the next stage;
    ``last``: from the last one. ``drafter`` and ``policy`` say which tokens go along before they are known,
    and how many. Where the last stage proposes them, by a ``head``, ``tail`` is how many of a prompt's last
    tokens it is told. ``chunk``: tokens of a prompt in one pass. ``reuse``: copy what a prompt shares with an
    earlier text, instead of computing it. ``stored``: what it has of prompts on disk. ``submit`` may be
    called by any thread.
    ``again``: told why, it waits until all stages are there again where one was lost, and returns new links;
    texts under way then go on from what they have. Without it they fail.
    At the end of a ``with`` block all stages end.
    """

    work: StageWork
    after: Mailbox | None = None
    last: Mailbox | None = None
    drafter: Drafter | None = None
    head: HeadDrafts | None = None  # where the first stage is the last one
    tail: int = 0
    policy: FewestSeconds = field(default_factory=FewestSeconds)
    trees: Callable[[Sequence[float], float, float, float], DraftTree] = best_tree
    chunk: int = CHUNK
    reuse: bool = True
    stored: StoredBlocks | None = None
    again: Callable[[LinkError], RingEnds] | None = None
    between: Sequence[Mailbox] = ()  # from all other stages
    ended: Callable[[Text], object] = lambda text: None  # hears of each text that had rows, on its own thread
    times: RingTimes = field(default_factory=RingTimes)

    def __post_init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._answers = Answers(self.work, head=self.head) if self.after is None else None
        self._rows = KeptTexts(self.work.cache.many, self.reuse)
        self._open = dict[int, Text]()  # they have rows
        self._queued = list[Text]()
        self._seeking = dict[int, Text]()  # the stages are asked for their stored blocks
        self._ready = list[Text]()  # something of theirs can be sent
        self._error: ThinwireError | None = None
        self.lost = ""  # which stage is waited for, if one is
        self._listen()
        self._thread = threading.Thread(target=self._run, name="text engine", daemon=True)
        self._thread.start()

    def submit(self, request: TextRequest, told: Callable[[Said], object] | None = None) -> Text:
        """Begin to continue a text, or let it wait for its turn; ``told``: as of ``Text``.

        Errors: ``InputError`` for one that is longer than the cache, ``FullError`` beyond ``QUEUED`` that
        wait; ``ThinwireError`` where the stages are lost.
        """
        if self._error is not None:
            raise type(self._error)(str(self._error))
        self._rows.check(len(request.prompt) + request.most)
        wrong = f"{QUEUED} requests wait for room in the cache already; try again later"
        require(len(self._queued) < QUEUED, FullError, wrong)
        text = Text(next(self._numbers), request, told=told)
        self._events.put(("new", text))
        return text

    def cancel(self, text: Text) -> None:
        """Stop a text that nobody wants any more; its rows are free for others."""
        self._events.put(("cancel", text))

    def lose(self, stage: int, why: str) -> None:
        """Hear from whoever watches over the stages that one is lost, before its link says so."""
        self._events.put(("lost", f"stage {stage} is lost: {why}".encode()))

    @property
    def error(self) -> ThinwireError | None:
        """Why nothing more can be asked, if so."""
        return self._error

    @property
    def waiting(self) -> int:
        """Requests that wait for rows."""
        return len(self._queued) + len(self._seeking)

    @property
    def running(self) -> int:
        """Requests that have rows."""
        return len(self._open)

    def close(self) -> None:
        """End all stages; what is under way fails. Safe to call twice."""
        self._events.put(("close", None))
        self._thread.join(0.0 if self.lost else 30.0)  # a meeting is not to be broken off

    # -- on its own thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._go_on():
                pass
            self._fail(LinkError("the server has ended"))
        except ThinwireError as e:
            self._fail(e)
        except Exception as e:  # any: whoever waits for a text must hear of it
            self._fail(ThinwireError(f"the first stage failed with {type(e).__name__}: {e}"))
        with contextlib.suppress(ThinwireError):
            self._say(STOP)

    def _listen(self) -> None:
        if self.last is not None:
            self.last.on(PICKS, lambda _, body: self._events.put(("picked", body)))
            self.last.on(FOUND, lambda _, body: self._events.put(("found", body)))
        for link in self._links():
            link.on(FAILED, lambda _, body: self._events.put(("failed", body)))
            link.on(LOST, lambda _, body: self._events.put(("lost", body)))

    def _links(self) -> set[Mailbox]:
        return {link for link in (self.after, self.last, *self.between) if link is not None}

    def _go_on(self) -> bool:
        """Take a turn, or begin again where a stage was lost; return whether to go on."""
        try:
            return self._turn()
        except LinkError as e:
            if self.again is None:
                raise
            self.lost = str(e)
            self.after, self.last, self.between = self.again(e)
        going = self._start_again()
        self.lost = ""
        return going

    def _start_again(self) -> bool:
        """Begin with all texts anew: a stage that is back has nothing of them; return whether to go on."""
        events = self._drained()  # what the stages said before is of no use any more
        texts = [*self._open.values(), *self._queued, *self._seeking.values()]
        for held in (self._open, self._queued, self._seeking, self._ready):
            held.clear()
        self._rows = KeptTexts(self._rows.many, self.reuse)
        self._listen()
        for text in texts:
            text.rewind()
            self._seek(text)
        for what, value in events:
            if isinstance(value, Text):
                self._hear(what, value)
        return all(what != "close" for what, _ in events)

    def _drained(self) -> list[tuple[str, object]]:
        """Return all that has happened and was not heard yet."""
        found = list[tuple[str, object]]()
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._events.get_nowait())
        return found

    def _turn(self) -> bool:
        """Hear what has happened, then send what can be sent; return whether to go on."""
        while True:
            try:
                what, value = self._events.get(timeout=0 if self._ready else TICK)
            except queue.Empty:
                break
            if what == "close":
                return False
            self._hear(what, value)
            if not self._ready:
                break
        for link in self._links():
            if link.error is not None and self._events.empty():  # a stage may say more
                raise LinkError(f"a stage is lost: {link.error}")
        self._begin()
        if self._ready:
            self._send()
        return True

    def _hear(self, what: str, value: object) -> None:
        if isinstance(value, Text):
            if what == "new":
                self._seek(value)
            elif self._seeking.pop(value.number, None) is not None and self.stored is not None:
                value.cancel()
                self.stored.forget(value.number)
                self._say(Close(value.number).pack())
                value.say([])
            elif value in self._queued or value.number in self._open:
                value.cancel()
                if value.number in self._open:
                    self._end(value)
                else:
                    self._queued.remove(value)
                value.say([])
        elif isinstance(value, bytes):
            if what == "found":
                self._sought(Sought.unpack(value))
                return
            if what != "picked":
                raise (LinkError if what == "lost" else ThinwireError)(value.decode(errors="replace"))
            for one in unpack_picked(value):
                self._take(one)

    def _seek(self, text: Text) -> None:
        """Find out how many blocks of a prompt all stages have stored, where that is more than rows have."""
        prompt, found = text.request.prompt, 0
        names = chain(prompt[:-1]) if self.stored is not None else []  # the last token is computed anyhow
        known = self._rows.known(prompt, map(_held, self._open.values())) if names else 0
        if self.stored is not None and len(names) * BLOCK > known:
            found = self.stored.seek(text.number, names)
        self._seeking[text.number] = text
        if self.after is None or found * BLOCK <= known:
            self._sought(Sought(text.number, found if self.after is None else 0))
        else:
            self._say(Seek(text.number, b"".join(names[:found])).pack())

    def _sought(self, found: Sought) -> None:
        text = self._seeking.pop(found.request, None)
        if text is not None:  # else it was cancelled
            text.stored = found.blocks
            self._queued.append(text)

    def _begin(self) -> None:
        """Give rows to those that wait, in their order."""
        while self._queued:
            text = self._queued[0]
            prompt = text.request.prompt
            need = len(prompt) + text.request.most + (MOST_DRAFTS if self.tail else 0)
            granted = self._rows.take(prompt, min(need, self._rows.many), map(_held, self._open.values()))
            if granted is None:
                return
            del self._queued[0]
            (text.rows, copy), text.times.began = granted, text.times.began or time.monotonic()
            stored = text.stored if text.stored * BLOCK > copy.many else 0
            copy = NO_COPY if stored else copy
            text.sent = text.reused = max(copy.many, stored * BLOCK)
            self._open[text.number] = text
            self._ready.append(text)
            self.work.cache.copy(copy, text.rows)
            if self.stored is not None:
                self.stored.place(text.number, stored, self.work.cache, text.rows)
            self._tell_of(text, text.rows, copy, stored)

    def _tell_of(self, text: Text, rows: TextRows, copy: RowCopy, stored: int) -> None:
        """Tell the other stages of a text, and the one that picks its tokens how."""
        picking, at = text.request.picking, max(0, text.start - self.tail)
        tail = tuple(text.piece(at, text.start - at)) if self.tail and text.request.drafts else ()
        if self._answers is not None:
            self._answers.open(text.number, picking, tail, at)
        self._say(Open.of(text.number, rows, picking, tail, at, copy, stored).pack())

    def _take(self, found: Picked) -> None:
        text = self._open.get(found.request)
        if text is None:
            return  # it was cancelled
        wrong = f"tokens at {found.at} of request {found.request}, which has {text.length}"
        good = found.at == text.length and 0 < len(found.tokens) <= len(text.sent_drafts) + 1
        require(good and len(found.drafts) == len(text.ahead.ranks), PayloadError, wrong)
        self._learn(text, found)
        text.rounds += 1
        new = text.take(list(found.tokens))
        if text.reason:
            self._end(text)  # before whoever asked hears of it, and perhaps asks for the next
        else:
            self._ready.append(text)
        text.say(new)

    def _learn(self, text: Text, found: Picked) -> None:
        """Take in how long a round took, and how many of its drafts were right."""
        many, way = len(text.sent_drafts), text.way_of(found.tokens)
        level = 1e-6 * found.micros
        seconds = time.monotonic() - text.asked - level * text.ahead.depth
        if many:
            text.drafted, text.accepted = text.drafted + many, text.accepted + len(way)
            text.shares.learn(text.sent_tree, way)
        if text.sent > text.start:  # not a prompt's
            self.times.note(many, seconds)
        if found.drafts:
            self.times.note_draft(level)
        text.keep(way, found.drafts)

    def _end(self, text: Text) -> None:
        if self.drafter is not None:
            self.drafter.forget(text.number)
        del self._open[text.number]
        if text in self._ready:
            self._ready.remove(text)
        if text.rows is not None:
            self._rows.leave(_held(text))
        if self._answers is not None:
            self._answers.close(text.number)
        self._say(Close(text.number).pack())
        self.ended(text)

    def _send(self) -> None:
        """Send one pass: all that wait for their next token, and ``chunk`` tokens of prompts."""
        portions, tokens, left, room = list[Portion](), list[int](), list[Text](), self.chunk
        for text in self._ready:
            if text.sent >= text.start:
                self._next(text, portions, tokens)
                continue
            while room and text.sent < text.start:
                room -= self._prompt(text, room, portions, tokens)
            if text.sent < text.start:
                left.append(text)
        self._ready = left
        whole = [self._open[p.segment.request] for p in portions if p.wanted == 1 and not p.drafted]
        self._pass(portions, torch.tensor([tokens]))
        for text in whole if self.stored is not None else ():
            self._save(text)

    def _save(self, text: Text) -> None:
        """Have the blocks of a prompt stored, once all of it has gone by for the first time."""
        prompt, rows = text.request.prompt, text.rows
        if self.stored is None or rows is None or text.saved:
            return
        text.saved, first = True, text.stored
        names = chain(prompt)[first:]
        if names:
            self.stored.save(names, first, self.work.cache, rows)
            self._say(Save(text.number, first, b"".join(names)).pack())

    def _prompt(self, text: Text, room: int, portions: list[Portion], tokens: list[int]) -> int:
        """Add the next tokens that are known; behind the last of them, the first new one is wanted.

        Those of an answer cross as they did when they were new, so that its text stays the same.
        """
        at, prompt = text.sent, len(text.request.prompt)
        many = min(room, prompt - at if at < prompt else min(PROMPT - 1, text.start - at))
        text.sent, text.asked = at + many, time.monotonic()
        last = text.sent == text.start
        text.ahead, text.sent_drafts, text.sent_tree = self._tree(text) if last else NO_DRAFTS, (), NO_DRAFTS
        portions.append(Portion(self._segment(text, at, many), int(last), ahead=text.ahead))
        tokens += text.piece(at, many)
        return many

    def _next(self, text: Text, portions: list[Portion], tokens: list[int]) -> None:
        """Add the newest token of a text, and drafts of what follows."""
        at, text.asked = text.length - 1, time.monotonic()
        text.sent_drafts, text.sent_tree = self._drafted(text)
        text.sent, text.ahead = text.length, self._tree(text)
        many = len(text.sent_drafts)
        parents = () if text.sent_tree.is_chain else text.sent_tree.parents
        segment = self._segment(text, at, 1 + many, parents)
        portions.append(Portion(segment, 1 + many, text.sent_drafts, text.ahead, text.kept))
        tokens += [text.made[-1], *text.sent_drafts]

    def _drafted(self, text: Text) -> tuple[tuple[int, ...], DraftTree]:
        """Return what may follow a text: what the last stage proposed, or what the drafter says now."""
        times, left = self.times, max(0, text.request.most - len(text.made) - 1)
        if self.tail:
            room = text.rows.many - text.length if text.rows is not None else 0
            return text.proposed[:room], text.ahead.first(room)
        if self.drafter is None or not text.request.drafts or not times.trip:
            return (), NO_DRAFTS
        site = DraftSite(text.shares.of_rank[0], times.trip, self._token_seconds, times.draft)
        many = min(left, *self.policy.choose([site]))
        began, held = time.perf_counter(), text.piece(0, text.length)
        found = self.drafter.draft(text.number, held, many, text.request.picking) if many else []
        times.note_draft((time.perf_counter() - began) / max(1, len(found)))
        return tuple(found), DraftTree.chain(len(found))

    def _tree(self, text: Text) -> DraftTree:
        """Return the drafts that the last stage is to send for the next round: none before one was timed."""
        times, left = self.times, text.request.most - len(text.made) - 2
        if not self.tail or not text.request.drafts or not times.trip or left < 1:
            return NO_DRAFTS
        return self.trees(text.shares.of_rank, times.trip, self._token_seconds, times.draft)

    @property
    def _token_seconds(self) -> float:
        """Seconds of one more draft for each text: those of all texts pass the stages together."""
        return self.times.token * max(1, len(self._open))

    def _segment(self, text: Text, at: int, many: int, parents: tuple[int, ...] = ()) -> TextSegment:
        if text.rows is None:
            raise ThinwireError(f"request {text.number} has no rows")
        return TextSegment(text.number, text.rows, at, many, parents)

    def _pass(self, portions: Sequence[Portion], tokens: Tensor) -> None:
        before = self.work.spent.compute
        found = self.work.extend(portions, tokens)
        stages = 1 + len(self._links())  # of about as much work each
        self.times.note_pass(tokens.shape[1], stages * (self.work.spent.compute - before))
        if self.after is not None:
            self.after.send(PASSES, pack_pass(self.work.code(portions, found)), "activations")
            return
        for one in self._answers.of(portions, found) if self._answers is not None else ():
            self._take(one)

    def _say(self, data: bytes) -> None:
        if self.after is not None:
            self.after.send(PASSES, data)

    def _fail(self, error: ThinwireError) -> None:
        self._error = error
        for what, value in self._drained():  # what came meanwhile is not heard any more
            if what == "new" and isinstance(value, Text):
                self._queued.append(value)
        for text in [*self._open.values(), *self._queued, *self._seeking.values()]:
            text.fail(error)
        self._open.clear()
        self._queued.clear()
        self._seeking.clear()


def _held(text: Text) -> HeldText:
    """Return what is in a text's rows."""
    if text.rows is None:
        raise ThinwireError(f"request {text.number} has no rows")
    return HeldText(text.rows, text.piece(0, text.sent))
