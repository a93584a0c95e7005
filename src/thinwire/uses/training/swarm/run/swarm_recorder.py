"""The keeper's record: who was there when, what rounds were made of, and how good the model is."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client_scheduler import MadeVersion, TurnCounts
from thinwire.rounds.remote.remote_server import SILENT
from thinwire.rounds.update_messages import Held
from thinwire.runs.machine.processor import environment, peak_rss_bytes, resident_peak
from thinwire.runs.records.run_record import PeakMemory, RecipeText
from thinwire.runs.records.writer import RunWriter
from thinwire.uses.training.run.record import Evaluation
from thinwire.uses.training.swarm.run.options import SwarmConfig
from thinwire.uses.training.swarm.run.record import MemberFigures, RoundFigures, RoundMetrics, SwarmRecord

SENTENCES = 20  # why a member was refused, that are kept
Told = Callable[[RoundMetrics, float | None], object]


class Host(Protocol):
    """What a recorder asks of whoever runs the rounds."""

    @property
    def now(self) -> float:
        """Seconds since the first round began."""
        ...

    @property
    def round_seconds(self) -> float:
        """The longest that the round may last."""
        ...

    @property
    def tally(self) -> TurnCounts:
        """What clients did."""
        ...


class SwarmRecorder:
    """Keep the record of a swarm in ``folder``; ``made`` says whether to go on.

    ``heldout`` returns the loss of weights [1, N] on held-out samples; ``spec`` prints what crosses links.
    """

    def __init__(
        self,
        config: SwarmConfig,
        server: Server,
        folder: Path,
        heldout: Callable[[Tensor], float] | None,
        spec: str,
        notes: list[str],
        told: Told,
    ) -> None:
        self.config, self.server, self._worth, self._told = config, server, heldout, told
        self.record = SwarmRecord(
            recipe=RecipeText("swarm", spec),
            config=config.to_dict() | {"resume": server.version > 0},  # else there is nothing to lose
            environment=environment(config.dtype, 1, None),
            notes=notes,
        )
        self._writer = RunWriter(folder, self.record, server.version)
        self._members: dict[int, MemberFigures] = {}
        self._newest: tuple[MadeVersion, RoundMetrics]
        self._before = 0.0  # when the last round was made, seconds of the host's clock
        self._counts = 0, 0  # late and refused by then
        self._samples = Counter[int]()  # by then, by member
        if not server.version:
            self.record.loss.eval_first = self._heldout()

    def _heldout(self) -> float | None:
        return self._worth(self.server.weights) if self._worth is not None else None

    def seen(self, client: int, here: bool, now: float) -> None:
        """Note that a member came or went at ``now``."""
        name = self.server.names().get(client) or f"member {client}"
        member = self._members.setdefault(client, MemberFigures(name, now))
        member.name = name
        if here:
            member.spells.append([now, None])
            member.left_s = None
        elif member.spells:
            member.spells[-1][1] = member.left_s = now

    def made(self, made: MadeVersion, host: Host) -> bool:
        """Note a round; return whether to go on. Its loss is for ``evaluate``, unless it is the last one."""
        line = self._line(made, host)
        self.record.rounds.append(
            RoundFigures(line.round, line.seconds, line.deadline_s, line.counted, line.late, line.refused)
        )
        self.record.totals["samples"] = float(host.tally.samples.total())
        self._writer.add(line)
        self._newest = made, line
        last = made.number >= self.config.rounds
        return not last or self.evaluate()

    def evaluate(self) -> bool:
        """Evaluate the newest round where that is due, and tell; return whether to go on."""
        (made, line), every = self._newest, self.config.eval_every
        last = made.number >= self.config.rounds
        loss = self._heldout() if last or (every and made.number % every == 0) else None
        if loss is not None:
            self.record.loss.evaluations.append(Evaluation(made.number, loss, seconds=made.at))
        self._told(line, loss)
        reached = loss is not None and self.config.until_loss is not None and loss <= self.config.until_loss
        return not (last or reached)

    def _line(self, made: MadeVersion, host: Host) -> RoundMetrics:
        verdicts, tally = self.server.verdicts, host.tally
        doubted = sum(v.trust == 0 for v in verdicts.values())
        reasons = {v.reason for v in verdicts.values()}
        not_taken = sum(SILENT not in r.reason and r.reason not in reasons for _, r in tally.refused)
        counts = tally.late.total(), not_taken
        late, refused = (now - then for now, then in zip(counts, self._counts, strict=True))
        taken = tally.samples - self._samples
        self._counts, self._samples = counts, Counter(tally.samples)
        untrusted = sum(taken[c] for c, v in verdicts.items() if v.trust == 0)
        totals = self.record.totals
        totals["counted"] = totals.get("counted", 0.0) + taken.total() - untrusted
        seconds, self._before = made.at - self._before, made.at
        for client, verdict in verdicts.items():
            if client in self._members:
                self._members[client].weight = verdict.trust
        return RoundMetrics(
            seconds=seconds,
            round=made.number,
            deadline_s=host.round_seconds,
            counted=made.updates - doubted,
            late=late,
            refused=refused + doubted,
            samples=taken.total(),
            lr=self.server.rates.at(made.number - 1),
        )

    def close(self, status: str, host: Host, ended: Mapping[int, Held], kit: int) -> None:
        """Write the final record. ``ended``: what members held at the end; ``kit``: bytes of kits sent."""
        record, server, tally = self.record, self.server, host.tally
        traffic = {c: server.traffic(c) for c in server.known}
        for n in ("up", "down", "raw_up", "raw_down"):
            record.bytes[n] = sum(getattr(t, n) for t in traffic.values())
        record.bytes["kit"] = kit
        record.totals |= {"seconds": host.now, "samples": float(tally.samples.total())}
        for client, t in traffic.items():
            member = self._members.setdefault(client, MemberFigures(server.names()[client], 0.0))
            member.rounds, member.samples = t.updates, tally.samples[client]
            member.up, member.down = t.up, t.down
            device = server.device(client)
            member.step_seconds = device.step_seconds
            member.sends = device.up if math.isfinite(device.up) else None
            said = [r.reason for _, r in tally.refused if r.client == client and SILENT not in r.reason]
            member.refused = list(dict.fromkeys(said))[:SENTENCES]
        record.members = [self._members[c] for c in sorted(self._members)]
        last = max((h.number for h in ended.values()), default=0)  # who only came by then holds an older one
        equal = {self._members[c].name: h for c, h in sorted(ended.items()) if h.number == last}
        record.equal = {name: f"{h.number}:{h.check:08x}" for name, h in equal.items()}
        found = record.loss.evaluations
        if found and found[-1].step == server.version:
            record.loss.eval_final = found[-1].heldout
        elif server.version:
            record.loss.eval_final = self._heldout()
        record.memory = PeakMemory([resident_peak(os.getpid()) or peak_rss_bytes()])
        self._writer.close(status)
