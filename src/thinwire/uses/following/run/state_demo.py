"""The state demo: it starts the trainer and two followers, breaks a link, and keeps the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.machine.processor import cores, environment
from thinwire.runs.models.model_source import resolve_model
from thinwire.runs.ranks.launcher import EmulatedLauncher, Launcher, LocalLauncher, link_of
from thinwire.runs.ranks.supervise import Heard, Workers
from thinwire.runs.records.finished_runs import Run
from thinwire.runs.records.progress import Display, megabytes
from thinwire.runs.records.run_record import LinkInfo, RecipeText, status_of
from thinwire.runs.records.writer import RunWriter
from thinwire.types import InputError
from thinwire.uses.following.recipes import STATE
from thinwire.uses.following.run.options import RATES, RECIPE, StateConfig
from thinwire.uses.following.run.record import STREAM, FollowerLog, StateRecord, StateVersionMetrics

PROGRAM = "thinwire.uses.following.run.demo_ranks:run_rank"
SILENCE = 240.0  # seconds without a word from anybody
TRAINER, WRITER, LATE = NAMES = ("trainer", "writer", "late")  # by rank
ROLES = {WRITER: "generates text; cut off for a while", LATE: "joins late"}
THROTTLED = "a throttled TCP proxy inside each follower: headers and losses cost nothing"
Show = Callable[["StateRecorder"], None]
ARRIVAL = ("version", "age", "nbytes", "seconds", "when")
SAME = ("version", "step", "rate", "loss", "changed")  # of a version, as the trainer says it
HEAD = ("process", "", "version", "age", "last patch", "ratio", "came in all", "link", "pause")
DASH = "–"


class StateDemo:
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
                StateDemo(played, workers, recorder).run()
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


def _place(config: StateConfig, stack: ExitStack) -> tuple[StateConfig, Launcher, str | None]:
    """Return an emulated network where one can be had, else this machine's loopback and the reason."""
    why = "it was not asked for"
    if config.emulate:
        try:
            return config, stack.enter_context(EmulatedLauncher(config, check=False)), None
        except InputError as e:
            why = str(e)
    return config.replace(emulate=False), stack.enter_context(LocalLauncher()), why


class StateRecorder:
    """Keep the record of a demo in ``out`` up to date. Times are seconds since the training began."""

    def __init__(self, out: Path, record: StateRecord) -> None:
        self.record, self.published = record, list[StateVersionMetrics]()
        self._writer = RunWriter(out, record)
        self._began = 0.0  # seconds since the epoch
        self._devices = dict[int, dict[str, Any]]()  # by rank

    def begin(self) -> None:
        """Let time begin: the training does."""
        self._began = time.time()

    @property
    def now(self) -> float:
        """Seconds since the training began; 0 before."""
        return time.time() - self._began if self._began else 0.0

    def hear(self, who: str, message: Mapping[str, Any]) -> None:
        """Note what a process said."""
        words = {k: v for k, v in message.items() if k not in ("kind", "at")}
        at = message.get("at", 0.0) - self._began
        log = self.record.followers.get(who)
        if "device" in message:
            self._devices[NAMES.index(who)] = words.pop("device")
            known = {"devices": [self._devices[rank] for rank in sorted(self._devices)]}
            self.record.environment = self.record.environment | known
        if message["kind"] == "published":
            self._version(words, at)
        elif message["kind"] == "trained":
            self.record.trained = words
        elif log is None:
            return
        elif message["kind"] == "arrived":
            log.arrivals.append({k: words[k] for k in ARRIVAL} | {"at": words["when"] - self._began})
        elif message["kind"] == "wrote":
            log.texts.append(words | {"at": at})
        elif message["kind"] == "status":
            log.status = words
        elif message["kind"] == "finished":
            log.finished = words | {"at": at}

    def _version(self, words: Mapping[str, Any], at: float) -> None:
        sent = words["sent"] - self.record.bytes[STREAM]  # which the lines before add up to
        following = sum(log.joined is not None for log in self.record.followers.values())
        bits = 8 * sent / (self.record.numel * following) if following and sent else None
        before = self.published[-1].at if self.published else 0.0
        line = StateVersionMetrics(
            seconds=at - before,
            bytes={STREAM: sent},
            bits={STREAM: bits},
            at=at,
            training_s=words["training"],
            publishing_s=words["publishing"],
            **{name: words[name] for name in SAME},
        )
        self.published.append(line)
        self._writer.add(line)

    def close(self, status: str, why: str = "") -> None:
        """Write the final record, with what came to the followers in all."""
        record, logs = self.record, list(self.record.followers.values())
        record.identical = record.ends_alike()
        versions = sum(v.at >= log.joined for log in logs if log.joined is not None for v in self.published)
        record.sent(STREAM, sum(log.wire_bytes for log in logs), record.numel * versions)
        if why:
            self._writer.note(why)
        self._writer.close(status)


def seconds(x: float | None) -> str:
    """Return a time in words.

    >>> seconds(0.0123), seconds(4.56), seconds(None)
    ('12 ms', '4.6 s', '–')
    """
    return DASH if x is None else f"{x * 1e3:.0f} ms" if x < 1 else f"{x:.1f} s"


def rows(recorder: StateRecorder) -> list[list[str]]:
    """Return the table: the trainer, then its followers."""
    record, last = recorder.record, recorder.published[-1] if recorder.published else None
    share = f"{last.changed / record.numel:.2%} of weights moved" if last and record.numel else DASH
    trainer = ["trainer", _training(recorder), str(last.version if last else 1), DASH, share, DASH,
               f"sent {megabytes(record.bytes[STREAM])}" if last else DASH, DASH,
               seconds(last.publishing_s if last else None)]  # fmt: skip
    return [trainer, *(_row(record, name, log) for name, log in record.followers.items())]


def _training(recorder: StateRecorder) -> str:
    config = recorder.record.config
    if not recorder.published:
        return "first step" if recorder.now else "loading"
    last = recorder.published[-1]
    total = config["steps"] * len(config["rates"])
    return f"step {last.step}/{total} at {last.rate:g}, loss {last.loss:.3f}"


def _row(record: StateRecord, name: str, log: FollowerLog) -> list[str]:
    if log.joined is None:
        return [name, log.role, *[DASH] * 7]
    s, last = log.status, log.arrivals[-1] if log.arrivals else None
    cut = len(log.cut) == 1
    return [
        name,
        log.role,
        str(s.get("held", DASH)),
        seconds(s.get("age")),
        megabytes(last["nbytes"]) if last else DASH,
        f"{record.ratio(last['nbytes']):.0f}×" if last else DASH,
        megabytes(log.wire_bytes),
        "cut" if cut else "up" if s.get("connected") else "down",
        seconds(s.get("pause")),
    ]


class Board(Display):
    """Show a run as it goes on. ``quiet`` shows nothing."""

    def update(self, recorder: StateRecorder) -> None:
        """Show what is new."""
        if self._live is not None:
            self.draw(_table(recorder), None)
        elif not self.quiet and self.due():
            text = "; ".join(" ".join(c for c in (r[0], *_plain(r)) if c) for r in rows(recorder))
            self.draw(None, f"{recorder.now:5.0f} s  {text}")


def _plain(row: list[str]) -> list[str]:
    name, what, version, age, patch, ratio, came, link, _ = row
    if name == "trainer":
        return [what, f"({patch})" if patch != DASH else ""]
    if link == DASH:
        return ["not here yet"]
    return [f"v{version}", f"age {age}", f"{patch} = {ratio}" if patch != DASH else "", came, link]


def _table(recorder: StateRecorder) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(*HEAD, box=None, pad_edge=False)
    for row in rows(recorder):
        table.add_row(*row)
    written = [t for log in recorder.record.followers.values() for t in log.texts]
    if not written:
        return table
    said = " ".join(written[-1]["text"].split())
    return Group(table, Text(f"weights of step {written[-1]['step']} write: {said}", style="italic"))
