"""Start the ranks of a run on this machine and watch over them, or join as one rank under torchrun."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from thinwire.runs.machine.files import check_out
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.ranks.launcher import Launcher, launcher_of
from thinwire.runs.ranks.rendezvous import starts_all
from thinwire.runs.ranks.supervise import Workers
from thinwire.runs.records.folder_lock import holding
from thinwire.runs.records.run_record import status_of
from thinwire.runs.records.writer import METRICS, RUN, load_run, read_metrics, write_json
from thinwire.types import InputError, MeasurementError, ThinwireError
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.record import StepMetrics, TrainRecord
from thinwire.uses.training.run.training_job import Job, prepare

PROGRAM = "thinwire.uses.training.run.training_rank:run_rank"


def launch(config: TrainConfig) -> Path:
    """Run ``config`` and return its folder.

    Under torchrun this process is one of the ranks; elsewhere it starts them all and waits.
    Errors: what the first failing rank raised; ``LinkError`` naming a rank that died; ``KeyboardInterrupt``
    once all ranks have stopped, after a Ctrl-C, SIGTERM or SIGHUP. No process is left behind.
    """
    if starts_all(config):
        with holding(config.out):
            _run_all(config)
    else:
        _run_one(config)
    return Path(config.out)


def _run_one(config: TrainConfig) -> None:
    """Run this process's rank, which somebody else started; the record is rank 0's."""
    from thinwire.uses.training.run.training_rank import run_rank

    with ExitStack() as stack:
        if os.environ["RANK"] == "0":
            stack.enter_context(holding(config.out))
        elif config.save_model or config.lora or config.checkpoint_every:
            check_out(config.out)  # or what was trained could not be kept
        run_rank(config, trial=True)
        if os.environ["RANK"] == "0":
            _check_inherited(config)


def _run_all(config: TrainConfig) -> None:
    """Start all ranks and wait for their end."""
    _check_resume(prepare(config))
    out, started = Path(config.out), time.time()
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals())
        place = _enter(stack, config)
        try:
            with Workers(place, PROGRAM, remedy=lambda: _again(out, config.ranks)) as ranks:
                ranks.run(config)
        except BaseException as error:
            _close_record(out, error, started, place)
            raise
        place.book(out)
    _check_inherited(config)


def _enter(stack: ExitStack, config: TrainConfig) -> Launcher:
    """Enter the place of a run, and say of a network that is not as asked for whose record there is."""
    try:
        return stack.enter_context(launcher_of(config))
    except MeasurementError as e:
        file = Path(config.out) / RUN
        earlier = f"; {file} is that of an earlier run" if file.exists() else ""
        raise MeasurementError(f"{e}{earlier}") from e


def _check_resume(job: Job) -> None:
    """Raise ``InputError`` before anything is started where a run could not go on from what is there."""
    from thinwire.uses.training.run.resume import check, check_own, newest_here

    config = job.config
    if config.resume or (config.auto_resume and newest_here(Path(config.out), config.ranks) is not None):
        check(job)
    elif config.auto_resume:
        for rank in range(config.ranks):
            check_own(job, rank)


def _check_inherited(config: TrainConfig) -> None:
    """Raise ``MeasurementError`` where a run went on from what was no measurement."""
    if config.resume or config.auto_resume:
        from thinwire.uses.training.run.resume import inherited

        why = inherited(load_run(config.out, TrainRecord))
        if why is not None:
            raise MeasurementError(why)


def _again(out: Path, ranks: int) -> str:
    from thinwire.uses.training.run.resume import newest_here

    step = newest_here(out, ranks)
    return "start again" if step is None else f"start again, with --resume from the checkpoint of step {step}"


def _close_record(out: Path, error: BaseException, started: float, place: Launcher) -> None:
    """Mark this run's record where its rank could not, or did not know why it had to stop."""
    why = str(error) or "interrupted"
    try:
        if (out / RUN).stat().st_mtime < started:
            return  # an earlier run's
        record = load_run(out, TrainRecord)
        if record.status == "running":  # it was killed
            with suppress(InputError, OSError):  # the record is to be closed all the same
                if (out / METRICS).stat().st_mtime >= started:  # else those steps are of the part before
                    record.recount(read_metrics(out, StepMetrics))
        if record.status in ("running", "interrupted"):  # rank 0 knows no more than that it was to stop
            record.status = status_of(error)
        if why not in record.notes:
            record.notes.append(why)
        with suppress(ThinwireError):  # the network is gone, as the error says
            record.link.emulator = place.describe()  # whoever goes on from here wants to know
        write_json(out / RUN, record.to_dict())
    except (InputError, OSError):  # no record, or no room for one: the error itself says more
        return
