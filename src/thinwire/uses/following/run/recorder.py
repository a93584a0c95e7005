"""The recorder of a state demo: it turns what the processes say into the run record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.runs.records.writer import RunWriter
from thinwire.uses.following.run.record import STREAM, StateRecord, VersionMetrics

ARRIVAL = ("version", "age", "nbytes", "seconds", "when")
SAME = ("version", "step", "rate", "loss", "changed")  # of a version, as the trainer says it


class StateRecorder:
    """Keep the record of a demo in ``out`` up to date. Times are seconds since the training began."""

    def __init__(self, out: Path, record: StateRecord) -> None:
        self.record, self.published = record, list[VersionMetrics]()
        self._writer = RunWriter(out, record)
        self._began = 0.0  # seconds since the epoch

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
        line = VersionMetrics(
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
