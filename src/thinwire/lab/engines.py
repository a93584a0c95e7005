"""The engines that leave run records: how each one's are read, and how its runs are shown.

Whoever adds an engine adds its line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from thinwire.lab.options import nearest
from thinwire.types import InputError

if TYPE_CHECKING:  # commands import this file, and their help needs none of these
    from thinwire.lab.records.runs import Run
    from thinwire.lab.records.schema import RunRecord
    from thinwire.lab.report.page import Show


class Engine(NamedTuple):
    """Where an engine's record class is, and the module that shows its runs; imported when needed."""

    record: tuple[str, str]
    show: str


ENGINES = {
    "pipeline": Engine(
        ("thinwire.lab.train.record.schema", "TrainRecord"), "thinwire.lab.train.record.cards"
    ),
    "replicas": Engine(
        ("thinwire.lab.train.record.schema", "ReplicasRecord"), "thinwire.lab.train.record.replica_cards"
    ),
    "pictures": Engine(("thinwire.lab.pictures.record", "PicturesRecord"), "thinwire.lab.pictures.cards"),
    "federated": Engine(("thinwire.lab.federated.record", "FederatedRecord"), "thinwire.lab.federated.cards"),
    "scene": Engine(("thinwire.lab.scenes.record", "SceneRecord"), "thinwire.lab.scenes.cards"),
    "model": Engine(("thinwire.lab.weights.record", "ModelRecord"), "thinwire.lab.weights.cards"),
    "state": Engine(("thinwire.lab.following.record", "StateRecord"), "thinwire.lab.following.cards"),
}


def read_record(values: Any, where: str) -> RunRecord:
    """Return the record that JSON values hold, of whatever kind; ``InputError`` names what is wrong."""
    from thinwire.lab.records.schema import FIRST

    if not isinstance(values, dict):
        raise InputError(f"{where}: the record is not an object; run it again")
    kind = "pipeline" if values.get("schema") == FIRST else str(values.get("kind"))
    if kind not in ENGINES:
        raise InputError(f"{where} is of the unknown kind {kind!r}{nearest(kind, ENGINES)}; update thinwire")
    module, name = ENGINES[kind].record
    record: RunRecord = getattr(import_module(module), name).from_dict(values, where)
    return record


def load_run(path: str | Path) -> RunRecord:
    """Read ``run.json``, given the file or its folder.

    Errors: ``InputError`` where it is missing, broken or not a run record.
    """
    from thinwire.lab.records.writer import read_json, run_file

    file = run_file(path)
    return read_record(read_json(file), str(file))


def load_runs(paths: Iterable[str | Path]) -> list[Run[Any]]:
    """Load every run under ``paths``, in the order given; see ``records.runs.load_runs``."""
    from thinwire.lab.records import runs

    return runs.load_runs(paths, read_record)


def show_of(loaded: Sequence[Run[Any]]) -> Show:
    """Return how these runs are shown; ``InputError`` where they are of several kinds."""
    kinds = list(dict.fromkeys(run.record.kind for run in loaded))
    if len(kinds) != 1:
        raise InputError(f"runs of {' and '.join(kinds)} have no page in common; give those of one kind")
    show: Any = import_module(ENGINES[kinds[0]].show)
    return show
