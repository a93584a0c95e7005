"""The state demo: one process trains and publishes, two follow over slow links, one late, one cut off.

All processes start from the same base, which nobody sends: publisher and followers know it by its hash.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.machine.processor import cores, environment
from thinwire.runs.models.source import resolve_model
from thinwire.runs.ranks.places import Emulated, Here, Place, link_of
from thinwire.runs.ranks.supervise import Heard, Workers
from thinwire.runs.records.runs import Run
from thinwire.runs.records.schema import LinkInfo, RecipeText, status_of
from thinwire.types import InputError
from thinwire.uses.following.recipes import STATE
from thinwire.uses.following.run.config import RATES, RECIPE, StateConfig
from thinwire.uses.following.run.record import FollowerLog, StateRecord
from thinwire.uses.following.run.recorder import StateRecorder

PROGRAM = "thinwire.uses.following.run.worker:run_rank"
SILENCE = 240.0  # seconds without a word from anybody
TRAINER, WRITER, LATE = NAMES = ("trainer", "writer", "late")  # by rank
ROLES = {WRITER: "generates text; cut off for a while", LATE: "joins late"}
THROTTLED = "a throttled TCP proxy inside each follower: headers and losses cost nothing"
Show = Callable[[StateRecorder], None]


class Demo:
    """What happens in one demo, among ``workers``."""

    def __init__(self, config: StateConfig, workers: Workers, recorder: StateRecorder) -> None:
        self.config, self.recorder, self.record = config, recorder, recorder.record
        self._workers = workers
        self._address = ""  # of the publisher: its port and token

    def run(self) -> None:
        """Play the whole of it. Errors: what a process said that failed."""
        self._workers.start(self.config)
        said = self._until("listening", TRAINER)
        self._address = f"{said['port']} {said['token']}"
        self.record.nbytes, self.record.numel = said["nbytes"], said["numel"]
        self._join(WRITER)
        self._until("following", WRITER)
        self.recorder.begin()
        self.record.followers[WRITER].joined = 0.0
        self._order(TRAINER, "go")
        self._train()
        last = self.record.trained["version"] if self.record.trained else 0
        for name in (WRITER, LATE):
            self._order(name, f"finish {last}")
        for name in (WRITER, LATE):
            if self.record.followers[name].finished is None:
                self._until("finished", name)
        self._workers.dismiss()

    def _train(self) -> None:
        """Hear of every step, and let happen what the configuration says."""
        config, writer = self.config, self.record.followers[WRITER]
        moments: list[tuple[float, Callable[[], None]]] = [
            (config.join, lambda: self._join(LATE)),
            (config.cut, lambda: self._cut(writer)),
            (config.restore, lambda: self._restore(writer)),
        ]
        while self.record.trained is None:
            self._workers.hear(SILENCE)
            while moments and len(self.recorder.published) >= moments[0][0] * config.total:
                moments.pop(0)[1]()
        for _, missed in moments:
            missed()

    def _cut(self, log: FollowerLog) -> None:
        log.cut = [self.recorder.now]
        self._order(WRITER, "cut")

    def _restore(self, log: FollowerLog) -> None:
        log.cut.append(self.recorder.now)
        self._order(WRITER, "restore")

    def _join(self, name: str) -> None:
        self.record.followers[name].joined = self.recorder.now
        self._workers.start(self.config)
        self._order(name, f"follow {self._address}")

    def _order(self, name: str, words: str) -> None:
        self._workers.order(NAMES.index(name), words)

    def _until(self, kind: str, name: str) -> dict[str, Any]:
        return self._workers.until(kind, NAMES.index(name))


def run(config: StateConfig, show: Show) -> Run[StateRecord]:
    """Play the demo, calling ``show`` several times a second, and return its run; its record is in ``out``.

    Errors: ``InputError`` for a model or link that cannot be; what a process said that failed.
    """
    resolve_model(config.model, None, trial=False)  # made or refused before anything is started
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals())
        played, place, why = _place(config, stack)
        recorder = StateRecorder(Path(config.out), _new_record(config, link_of(played), why))

        def turn(heard: Heard | None) -> None:
            if heard is not None:
                recorder.hear(NAMES[heard[0]], heard[1])
            show(recorder)

        try:
            with Workers(place, PROGRAM, NAMES, turn=turn) as workers:
                Demo(played, workers, recorder).run()
            if played.emulate:
                recorder.record.link.keep_time(place.describe())
        except BaseException as e:
            recorder.close(status_of(e), str(e))
            raise
        recorder.close("done")
    return Run(recorder.record.recipe.name, recorder.record, recorder.published)


def _new_record(config: StateConfig, link: LinkInfo, why: str | None) -> StateRecord:
    """Return the record of a demo that begins; ``why``: what an emulated network could not be had for."""
    recipe = STATE.parse(RECIPE)
    record = StateRecord(
        recipe=RecipeText(recipe.name, recipe.spec),
        config=config.to_dict() | {"rates": list(RATES)},
        environment=environment("fp32", cores()),
        link=link,
        followers={name: FollowerLog(role) for name, role in ROLES.items()},
    )
    if why:
        link.emulation = THROTTLED
        record.notes.append(f"the link is {THROTTLED}; an emulated network could not be had: {why}.")
    return record


def _place(config: StateConfig, stack: ExitStack) -> tuple[StateConfig, Place, str | None]:
    """Return an emulated network where one can be had, else this machine's loopback and the reason."""
    why = "it was not asked for"
    if config.emulate:
        try:
            return config, stack.enter_context(Emulated(config, check=False)), None
        except InputError as e:
            why = str(e)
    return config.replace(emulate=False), stack.enter_context(Here()), why
