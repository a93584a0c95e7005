"""Patches for a feed's followers, made on threads of their own: the followers' other business goes on.

A patch is there to be sent as soon as its first section is made. A keyframe takes as long as the state is
large, so there is a thread for these alone: nobody's patches wait for whoever joins late.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

from thinwire.links.inbox import renewed
from thinwire.state.history import History
from thinwire.state.patches.draft import Draft
from thinwire.types import LinkError
from thinwire.uses.following.push.send_schedule import Order

WORTH = 1 / 16  # of a draft's bytes: its first section may be of a small tensor alone
YOUNG = 10.0  # seconds that a keyframe is given to whoever joins: then a fresh one spares them older contents
FORGET = 0.5  # weight of the newest measurement in the mean times that a patch takes


class _DraftJob:
    """A draft that is made: ``begun`` when there is some of it to send, ``whole`` when there is all.

    ``sent``: somebody waits for it who will send it; else it is made to see how large it is.
    """

    def __init__(self, base: int, sent: bool) -> None:
        self.base, self.sent = base, sent
        self.began = monotonic()
        self.begun: Future[Draft] = Future()
        self.whole: Future[Draft] = Future()
        self.grown: list[tuple[float, int]] = []  # when there was more of it [s], and how many bytes then

    def lead(self, nbytes: int) -> float:
        """Return the seconds until there was a share of all its ``nbytes`` that is worth sending."""
        return next((at - self.began for at, n in self.grown if n >= WORTH * nbytes), 0.0)


class DraftMaker:
    """Make drafts, one keyframe and one patch at a time; each calls ``ready``, on a thread here."""

    def __init__(self, history: History, ready: Callable[[], None]) -> None:
        self._history, self._ready = history, ready
        self._patches = ThreadPoolExecutor(1, thread_name_prefix="patches")
        self._keyframes = ThreadPoolExecutor(1, thread_name_prefix="keyframes")
        self._kept: weakref.WeakValueDictionary[tuple[int, int], Draft] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._jobs: dict[int, _DraftJob] = {}  # by base: followers at one version share the work
        self._keyframe: weakref.ref[Draft] | None = None  # made last, while somebody uses it
        self._keyframe_at = 0.0
        self._trial: Draft | None = None  # made to see how large it is; it may be sent yet
        self._error: Exception | None = None
        self._closing = False
        self.seconds = self.lead = 0.0  # that a patch from a version takes, and until its first bytes; about

    def check(self) -> None:
        """Raise what ended a draft of which some may have been sent already."""
        if self._error is not None:
            raise renewed(self._error)

    def start(self, order: Order) -> Future[Draft]:
        """Return a future for the draft of an order, shared with others that are waiting for the same.

        It is done when there is some of it; for an order that compares, when it is whole.
        """
        self._jobs = {base: job for base, job in self._jobs.items() if not job.whole.done()}
        base = order.base if self._history.knows(order.base) else 0
        found = self._under_way(base, order) or (None if base else self._lately(order.above))
        if found is None:
            job = self._jobs[base] = _DraftJob(base, not order.compare)
            (self._patches if base else self._keyframes).submit(self._make, job)
            found = job.whole if order.compare else job.begun
        found.add_done_callback(lambda _: self._ready())  # at once where it is there already
        return found

    def _under_way(self, base: int, order: Order) -> Future[Draft] | None:
        """Return the future of what is made from ``base`` for others, None for nothing."""
        job = self._jobs.get(base)
        if job is None:
            return None
        old = job.begun.done() and job.begun.result().version <= order.above  # another one comes after it
        return job.whole if order.compare or old else job.begun

    def _lately(self, above: int) -> Future[Draft] | None:
        """Return the keyframe made last, if it is of a version over ``above`` and still young.

        A patch must lead on from there: then one more follower takes no time and no memory.
        """
        draft, made_at = self._keyframe() if self._keyframe is not None else None, self._keyframe_at
        if draft is None or draft.version <= above or monotonic() - made_at > YOUNG:
            return None
        if self._history.find(draft.version, draft.hash) != draft.version:
            return None
        found: Future[Draft] = Future()
        found.set_result(draft)
        return found

    def kept(self, base: int, version: int, content: int) -> Draft | None:
        """Return a draft that somebody still uses."""
        with self._lock:
            found = self._kept.get((base, version))
        return found if found is not None and found.hash == content else None

    def drafts(self) -> tuple[list[Draft], list[Draft]]:
        """Return all drafts that somebody still uses, and one that may be of use; from any thread."""
        with self._lock:
            return list(self._kept.values()), [self._trial] if self._trial is not None else []

    def close(self) -> None:
        """End the threads; what they make is left at its next section, and futures end with ``LinkError``.

        A section of a state of tens of GB takes seconds, all of a keyframe minutes.
        """
        self._closing = True
        for pool in (self._patches, self._keyframes):
            pool.shutdown()

    def _make(self, job: _DraftJob) -> None:
        try:
            job.whole.set_result(self._made(job))
        except Exception as e:
            if not job.begun.done():
                job.begun.set_exception(e)
            elif not self._closing:  # then nobody misses the rest
                self._error = e
            job.whole.set_exception(e)
        self._ready()

    def _made(self, job: _DraftJob) -> Draft:
        self._go_on()
        job.began = monotonic()
        patch = self._history.patch(job.base or None, job.sent, lambda draft: self._more(job, draft))
        if not job.begun.done():  # it had been made before
            self._more(job, Draft.of(patch))
        draft = job.begun.result()
        if not (draft.whole and draft.joined):
            draft.finish(patch)
        self._keep(draft)
        if not draft.base:
            self._keyframe, self._keyframe_at = weakref.ref(draft), monotonic()
        else:
            self.seconds += FORGET * (monotonic() - job.began - self.seconds)
            self.lead += FORGET * (job.lead(draft.nbytes) - self.lead)
        return draft

    def _more(self, job: _DraftJob, draft: Draft) -> None:
        """Let those who wait for a draft begin with it, or go on."""
        self._go_on()
        job.grown.append((monotonic(), draft.nbytes))
        if job.begun.done():
            self._ready()
            return
        kept = self.kept(draft.base, draft.version, draft.hash)
        if kept is not None and kept.whole:
            draft = kept  # made again, but once in memory is enough
        elif job.sent:
            self._keep(draft)
        else:
            self._trial = draft  # known before its versions are forgotten by who made it
        job.begun.set_result(draft)  # which says that it is ready

    def _go_on(self) -> None:
        """Raise ``LinkError`` once this end closes: what is being made is for nobody."""
        if self._closing:
            raise LinkError("this end is being closed")

    def _keep(self, draft: Draft) -> None:
        with self._lock:
            self._kept[draft.base, draft.version] = draft
            self._trial = None if self._trial is draft else self._trial
