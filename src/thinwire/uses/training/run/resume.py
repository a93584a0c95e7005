"""Checkpoints of a running job: what is trained, optimiser, references; of every rank and one step or none.

Frozen weights are not in them: with adapters a checkpoint holds the adapters alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from thinwire.channels.references import under
from thinwire.replacing import replacing
from thinwire.runs.machine.files import REMEDY
from thinwire.runs.options import flag
from thinwire.runs.records.run_record import INVALID, RunRecord
from thinwire.runs.records.writer import load_run, write_json
from thinwire.types import InputError
from thinwire.uses.training.pipeline.compressed_stage import CompressedStage
from thinwire.uses.training.replicas.synchroniser import Synchroniser
from thinwire.uses.training.run.learning_rates import learning_rate, warmup_steps
from thinwire.uses.training.run.options import DEFAULT_STEPS, TrainConfig
from thinwire.uses.training.run.stepper import trained
from thinwire.uses.training.run.training_job import Job

FOLDER = "checkpoints"
KEPT = 2  # a rank may die while it writes the newest one
PIECE = 32 * 10**6  # bytes of references in a file, and in memory meanwhile
SPOILT = "no measurement: "  # how a note begins that says why the times of a run are no result
# Options that a resumed run may change.
FREE = set(TrainConfig.names(free=True))
LENGTH = {"steps", "epochs"}  # where the past does not depend on it, a run may end elsewhere
CONTENTS = {"data", "text_field", "prompt_field", "model"}  # not the place counts, but what is there


def steps_saved(out: Path, rank: int) -> list[int]:
    """Return the steps of which this rank has a whole checkpoint, ascending."""
    return sorted(step for step, folder in _all(out) if (folder / f"rank-{rank}.json").exists())


def newest(saved: Sequence[Sequence[int]]) -> int | None:
    """Return the newest step that is in the list of every rank, if one is."""
    return max(set(saved[0]).intersection(*saved[1:]), default=None)


def newest_here(out: Path, ranks: int) -> int | None:
    """Return the newest step of which all ranks have a checkpoint, where all of them are on this machine."""
    return newest([steps_saved(out, rank) for rank in range(ranks)])


def resumable(job: Job, saved: Sequence[Sequence[int]]) -> int:
    """Return the step to go on from, given what each rank ``saved``; ``InputError`` where there is none."""
    step = newest(saved)
    if step is None:
        raise InputError(
            f"--resume: no checkpoint of all ranks in {job.config.out}; leave --resume out to start anew"
        )
    if step > job.steps:
        raise InputError(f"--resume: the checkpoint is of step {step}, the run of {job.steps}; raise --steps")
    return step


def check(job: Job) -> None:
    """Raise ``InputError`` where a job whose ranks are all on this machine cannot go on from a checkpoint."""
    out, ranks = Path(job.config.out), range(job.config.ranks)
    folder = _folder(out, resumable(job, [steps_saved(out, rank) for rank in ranks]))
    for rank in ranks:
        with _readable(folder):
            _saved(folder, rank, job)


def check_own(job: Job, rank: int) -> None:
    """Raise ``InputError`` where this rank's newest checkpoint is of another configuration, text or model."""
    out = Path(job.config.out)
    for step in steps_saved(out, rank)[-1:]:
        with _readable(_folder(out, step)):
            _saved(_folder(out, step), rank, job)


def of_no_use(saved: Sequence[Sequence[int]]) -> list[str]:
    """Return a note on checkpoints that not all ranks have, if any rank has one."""
    if not any(saved):
        return []
    found = (f"of {f'step {steps[-1]}' if steps else 'none'} (rank {r})" for r, steps in enumerate(saved))
    *most, last = found
    listed = f"{', '.join(most)} and {last}"
    return [f"begun anew: the newest checkpoints are {listed}; they stay until the first new one"]


def clear(out: Path, rank: int) -> None:
    """Remove this rank's checkpoints: those of an earlier run in the same folder are not this run's."""
    for _, folder in _all(out):
        _drop(folder, rank)


def forget_after(out: Path, rank: int, step: int) -> None:
    """Remove this rank's checkpoints of later steps: a run that goes on from ``step`` leaves them behind."""
    for there, folder in _all(out):
        if there > step:
            _drop(folder, rank)


class Checkpoints:
    """One rank's checkpoints of a job: from stages, their optimiser and synchroniser, and back into them."""

    def __init__(
        self,
        job: Job,
        rank: int,
        stages: list[CompressedStage],
        optimiser: torch.optim.Optimizer,
        synchroniser: Synchroniser | None = None,
    ) -> None:
        self._job, self._rank = job, rank
        self._stages, self._optimiser, self._synchroniser = stages, optimiser, synchroniser
        self._out = Path(job.config.out)

    def save(self, step: int, totals: dict[str, Any]) -> None:
        """Write the state after ``step`` steps. The JSON file comes last and makes it count."""
        folder, rank = _folder(self._out, step), self._rank
        folder.mkdir(parents=True, exist_ok=True)
        _empty(folder, rank)  # of what an earlier run left: its JSON would make a half-written one count
        try:
            _write_state(self._state(), folder / f"rank-{rank}.safetensors")
            saved = {"step": step, "totals": totals, "references": self._write_references(folder)}
            write_json(folder / f"rank-{rank}.json", saved | self._origin())
        except BaseException:
            _empty(folder, rank)  # the folder stays: another rank may be about to write its first file there
            raise
        for old in steps_saved(self._out, rank)[:-KEPT]:
            _drop(_folder(self._out, old), rank)

    def _origin(self) -> dict[str, Any]:
        job = self._job
        # The samples' ids are the keys of the references, so their text must be the same too.
        contents = {"data": job.digest, "model": job.source.digest}
        return contents | {"config": job.config.to_dict(), "cut": [len(part) for part in job.cut]}

    def _state(self) -> dict[str, Tensor]:
        state = {f"optimiser.{k}": v for k, v in _optimiser_state(self._optimiser).items()}
        state["rng"] = torch.get_rng_state()
        if self._synchroniser is not None:
            state |= {f"replicas.{k}": x.clone() for k, x in self._synchroniser.state_dict().items()}
        for i, stage in enumerate(self._stages):
            # Copies, because stages may share storage (tied heads); the file may not.
            state |= {f"stage{i}.{k}": p.detach().clone() for k, p in trained(stage).items()}
        return {name: tensor.contiguous() for name, tensor in state.items()}

    def _write_references(self, folder: Path) -> dict[str, int]:
        """Write each end's references in files of bounded size; return how many files each has."""
        written: dict[str, int] = {}
        for i, stage in enumerate(self._stages):
            for end, states in stage.reference_states().items():
                name = f"references{i}.{end}"
                for n, piece in enumerate(_pieces(states)):
                    _write_state(piece, _piece(folder, self._rank, name, n))
                    written[name] = n + 1
        return written

    def load(self, step: int) -> dict[str, Any]:
        """Take over the checkpoint of ``step`` and return the totals saved with it.

        Errors: ``InputError`` where the checkpoint is of another configuration or cannot be read.
        """
        folder, rank = _folder(self._out, step), self._rank
        with _readable(folder):
            saved = _saved(folder, rank, self._job)
            self._restore(load_file(folder / f"rank-{rank}.safetensors"))
            self._restore_references(folder, saved["references"])
            return dict(saved["totals"])

    def _restore(self, state: dict[str, Tensor]) -> None:
        for i, stage in enumerate(self._stages):
            saved, own = under(state, f"stage{i}."), trained(stage)
            if saved.keys() != own.keys():
                raise ValueError(
                    f"it holds {len(saved)} trained tensors of stage {stage.stage_index}, "
                    f"not the {len(own)} of this run"
                )
            stage.submod.load_state_dict(saved, strict=False)
        _load_optimiser(self._optimiser, under(state, "optimiser."))
        torch.set_rng_state(state["rng"])
        if self._synchroniser is not None:
            self._synchroniser.load_state_dict(under(state, "replicas."))

    def _restore_references(self, folder: Path, written: dict[str, int]) -> None:
        def read(name: str) -> Iterator[dict[str, Tensor]]:
            for n in range(written[name]):
                yield load_file(_piece(folder, self._rank, name, n))

        for i, stage in enumerate(self._stages):
            prefix = f"references{i}."
            ends = {name.removeprefix(prefix): read(name) for name in written if name.startswith(prefix)}
            stage.load_reference_states(ends)


def saved_cut(out: Path, rank: int) -> list[int] | None:
    """Return the layers of each stage in this rank's newest checkpoint, or None without a readable one."""
    steps = steps_saved(out, rank)
    try:
        meta = json.loads((_folder(out, steps[-1]) / f"rank-{rank}.json").read_text("utf-8"))
        return [int(size) for size in meta["cut"]]
    except (IndexError, OSError, ValueError, KeyError, TypeError):
        return None


def inherited(record: RunRecord) -> str | None:
    """Return the note of a record that says why what it went on from was no measurement; None: it was one."""
    return next((note for note in record.notes if note.startswith(SPOILT)), None)


def bytes_saving(out: Path) -> int:
    """Return the bytes that saving took in the run whose record is in ``out``; 0 where there is none."""
    try:
        return load_run(out, RunRecord).bytes.get("saving", 0)
    except InputError:
        return 0


def doubts(config: TrainConfig, step: int) -> list[str]:
    """Return notes on what speaks against the times of the run that ``config`` goes on from after ``step``.

    Its seconds and bytes are summed with the new ones under the new link's name, so what spoils them spoils
    the sum: ``inherited`` finds that note, in this record and in those of runs that go on from it.
    """
    try:
        old = load_run(config.out, RunRecord)
    except InputError:  # nobody knows what it was
        return []
    why = _spoilt(old, config, step)
    if why is not None:
        return [why]
    judged = bool(old.link.emulator) or old.link.lateness_s is not None
    if old.link.emulation == "none" or judged:
        return []
    return [f"how late the link was up to step {step} is not known: that run did not come to its end"]


def _spoilt(old: RunRecord, config: TrainConfig, step: int) -> str | None:
    if (before := inherited(old)) is not None:
        return before
    why = None
    if old.status == INVALID:
        reason = (old.notes or ["for no known reason"])[-1]
        why = f"the part up to step {step} is of an invalid run ({reason})"
    elif old.link.emulator.get("valid") is False:  # as it was when the run was ended
        why = f"the emulated link did not keep its time up to step {step}"
    for name in ("emulate", "link", *(["congestion"] if config.emulate else [])):
        now = getattr(config, name)
        then = old.config.get(name, now)
        if why is None and then != now:
            why = f"{flag(name)} was {then!r} up to step {step} and is {now!r} since then"
    return f"{SPOILT}{why}; to measure, start anew without --resume" if why else None


def _folder(out: Path, step: int) -> Path:
    return Path(out) / FOLDER / f"step-{step:08d}"


def _all(out: Path) -> list[tuple[int, Path]]:
    """Return the step and folder of every checkpoint, those that a killed rank was writing included.

    A folder of any other name, a copy that somebody made, is none.
    """
    found = (Path(out) / FOLDER).glob("step-*")
    return [(int(f.name[5:]), f) for f in found if re.fullmatch(r"step-[0-9]{8}", f.name)]


def _piece(folder: Path, rank: int, name: str, number: int) -> Path:
    return folder / f"rank-{rank}.{name}.{number:05d}.safetensors"


def _pieces(states: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Gather small states to ones of about ``PIECE`` bytes."""
    piece: dict[str, Tensor] = {}
    nbytes = 0
    for state in states:
        piece |= state
        nbytes += sum(t.nbytes for t in state.values())
        if nbytes >= PIECE:
            yield piece
            piece, nbytes = {}, 0
    if piece:
        yield piece


def _write_state(state: dict[str, Tensor], file: Path) -> None:
    try:
        with replacing(file) as temporary:
            save_file(state, temporary)
    except (OSError, SafetensorError) as e:
        raise InputError(f"cannot write the checkpoint {file} ({e}); {REMEDY}") from e


def _empty(folder: Path, rank: int) -> None:
    (folder / f"rank-{rank}.json").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):  # another rank had it empty first, and removed the folder
        for file in folder.iterdir():
            if file.name.removeprefix(".").startswith(f"rank-{rank}."):  # hidden: killed while writing
                file.unlink(missing_ok=True)


def _drop(folder: Path, rank: int) -> None:
    _empty(folder, rank)
    with contextlib.suppress(OSError):  # another rank's files are still there, or it was quicker
        folder.rmdir()


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Make an ``InputError`` of whatever a checkpoint that is damaged, or another's, raises."""
    try:
        yield
    except InputError:
        raise
    # RuntimeError, KeyError, TypeError: a whole file with something else in it
    except (OSError, SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as e:
        why = " ".join(str(e).split())[:200]
        raise InputError(
            f"the checkpoint in {folder} cannot be read ({why}); remove it to go on from an older one"
        ) from e


def _saved(folder: Path, rank: int, job: Job) -> dict[str, Any]:
    """Return a rank's JSON of a checkpoint; ``InputError`` where it is of another configuration or text."""
    saved: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text("utf-8"))
    _check_same(saved["config"], job)
    for name, now in (("data", job.digest), ("model", job.source.digest)):
        if saved.get(name, now) != now:  # earlier checkpoints say nothing of the model's contents
            what = f"{flag(name)} {getattr(job.config, name)}{_fields(saved['config'], job.config, name)}"
            raise InputError(f"--resume: {what} is not what the checkpoint was made with; restore it")
    return saved


def _fields(saved: dict[str, Any], config: TrainConfig, contents: str) -> str:
    """Return how the text is read now, where that is not how it was."""
    names = [
        n for n in ("text_field", "prompt_field") if saved.get(n, getattr(config, n)) != getattr(config, n)
    ]
    if contents != "data" or not names:
        return ""
    return " with " + " and ".join(f"{flag(name)} {getattr(config, name)!r}" for name in names)


def _check_same(saved: dict[str, Any], job: Job) -> None:
    config = job.config
    now = _resolved(config.to_dict())
    moves = {name: saved.get(name) for name in LENGTH} != {name: now[name] for name in LENGTH}
    free = CONTENTS | FREE | (LENGTH if moves and _same_past(saved, job) else set())
    for key, value in _resolved(saved).items():
        if key not in free and now.get(key) != value:
            before, asked = ("the default" if v is None else repr(v) for v in (value, now.get(key)))
            raise InputError(
                f"--resume: the checkpoint was made with {flag(key)} {before}, this run asks for {asked}; "
                "use the same or another --out"
            )


def _resolved(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"lr": learning_rate(options), "warmup": warmup_steps(options)}


def _same_past(saved: dict[str, Any], job: Job) -> bool:
    """Return whether a run of another length takes the same samples, and rates, as far as both go."""
    steps, epochs = saved.get("steps"), saved.get("epochs")
    steps = DEFAULT_STEPS if steps is None and epochs is None else steps
    now = job.batches
    then = dataclasses.replace(now, steps=steps, epochs=epochs)
    alike = then.steps_per_pass == now.steps_per_pass and torch.equal(then.samples(), now.samples())
    return alike and (job.config.lr_schedule == "constant" or len(then) == len(now))


def _optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state by position of the parameter: tensors only, no pickle."""
    return {
        f"{i}.{name}": torch.as_tensor(value)
        for i, slots in optimiser.state_dict()["state"].items()
        for name, value in slots.items()
    }


def _load_optimiser(optimiser: torch.optim.Optimizer, flat: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in flat.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    groups = optimiser.state_dict()["param_groups"]
    optimiser.load_state_dict({"state": state, "param_groups": groups})
