"""A swarm whose members come, go and lie, against one in which all stay: ``make bench-swarm-churn``.

Eight members train the small GPT-2, from random weights, on a text that nothing here was tuned on. Each is a
process that only dials out over 20 Mbit/s and 30 ms, below the kernel's TCP. Each minute one ends without a
word, and another joins. Two of the eight lie. Then six members that all stay and tell the truth train on as
many samples as counted. ``python -m bench.swarms.churn [WORD]``: the cells that have this word.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.study.cells import ROOT, Kept, run_study
from bench.study.tables import DASH, Draw, columns
from thinwire.rounds.update_messages import VersionMessage
from thinwire.runs.data.debian import unpacked_package
from thinwire.runs.machine.cache import cache_folder, scratch_for
from thinwire.uses.training.swarm.member import SwarmMember
from thinwire.uses.training.swarm.run.liars import Liar
from thinwire.uses.training.swarm.run.options import SwarmConfig
from thinwire.uses.training.swarm.run.record import SwarmRecord
from thinwire.uses.training.swarm.run.swarm_demo import SwarmDemoConfig, kind_of, play, run_rank

KEPT = Kept("churn")
PACKAGE = "fortunes"  # Debian's: 2 MB of English sayings, which no other study reads
LIES = ("turned,grown", "copied,noise", "noise,turned")
SEEDS = (0, 1, 2)
THERE, CHANGES, EVERY = 8, 6, 60.0
LINK = "20mbit,30ms;0=100mbit,30ms"
COPIED = "copied"
KEEPER: dict[str, Any] = {
    "model": "gpt2-lab",
    "seq": 64,
    "rounds": 24,
    "local_steps": 12,
    "members": THERE,
    "eval_every": 6,
    "eval_samples": 128,
    "warmup": 1,
    "save_model": False,
    "quiet": True,
}


class Cell(NamedTuple):
    lies: str
    seed: int


def cells() -> Iterator[Cell]:
    """Yield all cells: other lies with each seed."""
    return (Cell(lies, seed) for lies, seed in zip(LIES, SEEDS, strict=True))


def text() -> Path:
    """Return the text's file, fetched once from Debian's package without installing it."""
    file = cache_folder() / f"{PACKAGE}.txt"
    if not file.exists():
        with scratch_for(file) as scratch:
            folder = unpacked_package(PACKAGE, scratch) / "usr/share/games/fortunes"
            sayings = sorted(f for f in folder.iterdir() if f.is_file() and not f.suffix)
            file.write_bytes(b"\n".join(f.read_bytes() for f in sayings))
    return file


class Timed(SwarmMember):
    """An honest member that notes in ``folder`` how old its process is as it begins to train."""

    folder: Path

    def change(self, version: VersionMessage, start: Tensor) -> Tensor:
        """Return what the local steps changed, [1, N]."""
        file = self.folder / f"{self.id}.began"
        if version.sequence and not file.exists():
            file.write_text(f"{age():.1f}")
        return super().change(version, start)


class Overheard(Timed):
    """An honest member whose changes a liar can read: ``folder`` has that of its last version."""

    _last: Path | None = None

    def change(self, version: VersionMessage, start: Tensor) -> Tensor:
        """Return what the local steps changed, [1, N]."""
        true = super().change(version, start)
        file = self.folder / f"{version.number}-{self.id}.change"
        part = file.with_suffix(".part")
        true.cpu().numpy().tofile(part)
        part.rename(file)
        if self._last is not None:
            self._last.unlink(missing_ok=True)
        self._last = file
        return true


class Copier(Liar):
    """Send what another member learnt in this round, as soon as it did; nothing of its own."""

    folder: Path

    def change(self, version: VersionMessage, start: Tensor) -> Tensor:
        """Return another's change, [1, N]; its own where nobody's comes within 20 seconds."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            file = next(iter(sorted(self.folder.glob(f"{version.number}-*.change"))), None)
            if file is not None:
                return torch.from_numpy(np.fromfile(file, np.float32)).view(1, -1).to(start.device)
            time.sleep(0.1)
        return SwarmMember.change(self, version, start)


def age() -> float:
    """Return the seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def kinds(config: SwarmDemoConfig, rank: int) -> type[SwarmMember]:
    """Return what kind of member a rank is: also a copier, and those it overhears."""
    lie = config.liars.get(rank)
    if lie and lie != COPIED:
        return kind_of(config, rank)
    kind = Copier if lie else Overheard if COPIED in config.lies else Timed
    return type(kind.__name__, (kind,), {"folder": Path(config.out)})


def program(config: SwarmDemoConfig) -> None:
    """Keep the swarm, or take part."""
    run_rank(config, kinds)


def measure(cell: Cell) -> dict[str, Any]:
    """Run one swarm, and the run beside it."""
    out = ROOT / "runs" / f"swarm-churn-{cell.seed}"
    shutil.rmtree(out, ignore_errors=True)
    keeper = SwarmConfig.from_dict(KEEPER | {"data": str(text()), "seed": cell.seed, "out": str(out)})
    config = SwarmDemoConfig(
        swarm=keeper.to_json(),
        link=LINK,
        emulate=True,
        there=THERE,
        changes=CHANGES,
        every=EVERY,
        lies=cell.lies,
        seed=cell.seed,
        out=str(out),
    )
    record = play(config, lambda line: print(line, flush=True), f"{__name__}:program")
    return found_in(record, config) | {"began": {f.stem: float(f.read_text()) for f in out.glob("*.began")}}


def found_in(record: SwarmRecord, config: SwarmDemoConfig) -> dict[str, Any]:
    """Return what a record says of the goals."""
    liars = {f"member-{rank}": lie for rank, lie in config.liars.items()}
    members = {m.name: m for m in record.members}
    steps = sum(m.samples for m in record.members) / record.config["batch"]
    values = record.bytes["raw_up"] / 4 / sum(m.rounds for m in record.members)
    return {
        "loss": record.loss.eval_final,
        "clean": record.clean_loss,
        "evaluations": [[e.step, e.heldout] for e in record.loss.evaluations],
        "samples": record.totals["samples"],
        "counted": record.totals["counted"],
        "seconds": record.totals["seconds"],
        "rounds": [[r.seconds, r.deadline_s, r.counted, r.late, r.refused] for r in record.rounds],
        "bits": 8 * record.bytes["up"] / values / steps,
        "bytes": record.bytes,
        "refused": {name: m.refused for name, m in members.items() if m.refused},
        "liars": {name: [lie, members[name].rounds] for name, lie in liars.items()},
        "members": [[m.name, m.joined_s, m.left_s, m.rounds, m.samples] for m in record.members],
        "equal": len(set(record.equal.values())) == 1,
        "notes": record.notes,
        "valid": record.status == "done",
    }


def named(reasons: list[str]) -> int | None:
    """Return the round in which a member was named, by what is said of its updates.

    >>> named(["it sent noise", "it sent noise (named at version 1)"]), named(["it sent noise"])
    (2, None)
    """
    found = [int(n) for why in reasons for n in re.findall(r"named at version (\d+)", why)]
    return min(found) + 1 if found else None


def summary() -> dict[str, Any]:
    """Return a row a cell, and how each goal fared."""
    found = [(cell, KEPT.get(cell)) for cell in cells()]
    return {"keeper": KEEPER, "rows": [_row(cell, each) for cell, each in found if each]}


def _row(cell: Cell, found: dict[str, Any]) -> dict[str, Any]:
    liars, refused = found["liars"], found["refused"]
    began = sorted(seconds for client, seconds in found["began"].items() if int(client) >= THERE)
    return {
        "lies": cell.lies,
        "seed": cell.seed,
        "loss": found["loss"],
        "clean": found["clean"],
        "above": found["loss"] / found["clean"] - 1,
        "bits": found["bits"],
        "rounds": len(found["rounds"]),
        "round": median(seconds for seconds, *_ in found["rounds"]),
        "late": max(seconds - deadline for seconds, deadline, *_ in found["rounds"]),
        "named": {name: named(refused.get(name, [])) for name in liars},
        "honest_named": [n for n, why in refused.items() if n not in liars and named(why)],
        "honest_once": [n for n in refused if n not in liars],
        "joined": began,
        "equal": found["equal"],
    }


churn = columns(  # members that come, go and lie, beside those that do not
    "rows", ("two of eight send", lambda r: r["lies"].replace(",", ", ")),
    ("held-out loss", "{loss:.3f}"), ("if all stay", "{clean:.3f}"), ("above", "{above:+.1fc} %"),
    ("bits a value and step", "{bits:.4f}"),
    ("a round", "{round:.1f} s"), ("past its deadline", "{late:+.1f} s"),
    ("a joiner trains after", lambda r: f"{min(r['joined']):.0f} to {max(r['joined']):.0f} s"),
    ("liars named in round", lambda r: ", ".join(str(n or DASH) for n in r["named"].values())),
    ("honest ones named", lambda r: str(len(r["honest_named"]))),
)  # fmt: skip
TABLES: dict[str, Draw] = {"churn": churn}

if __name__ == "__main__":
    from bench.swarms import churn as study  # by the name under which the processes import it

    run_study("churn", sys.argv[1:], cells, study.measure, study.summary)
