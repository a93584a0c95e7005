"""Checkpoint folders: what is whole, and what two ranks may do to one at the same time."""

import json
import os
import re
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.disk import DiskStore
from thinwire.channels.memory import Delta
from thinwire.runs.data.batches import Batches
from thinwire.types import InputError
from thinwire.uses.training.run import resume, training_launch
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.stepper import scheduled_rate

MODEL, OTHER = SimpleNamespace(digest="m"), SimpleNamespace(digest="n")
SAMPLES, VALUES, MEMORY, PIECE = 60, 250_000, 2 * 10**6, 3 * 10**6  # 60 MB of references at each end


def written(out: Path, step: int, *ranks: int) -> Path:
    folder = out / resume.FOLDER / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        for ending in ("safetensors", "json"):
            (folder / f"rank-{rank}.{ending}").write_text("{}")
    return folder


def test_a_checkpoint_counts_once_its_json_is_there(tmp_path: Path):
    written(tmp_path, 4, 0)
    (written(tmp_path, 8, 0) / "rank-0.json").unlink()
    assert resume.steps_saved(tmp_path, 0) == [4]
    assert resume.steps_saved(tmp_path, 1) == []


def test_clearing_takes_this_rank_s_files_and_the_last_one_the_folder(tmp_path: Path):
    folder = written(tmp_path, 4, 0, 1)
    resume.clear(tmp_path, 0)
    assert resume.steps_saved(tmp_path, 0) == []
    assert resume.steps_saved(tmp_path, 1) == [4]
    resume.clear(tmp_path, 1)
    assert not folder.exists()


def test_another_rank_may_have_removed_the_folder_meanwhile(tmp_path: Path):
    folder = written(tmp_path, 4, 0, 1)
    resume._drop(folder, 1)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    resume._drop(folder, 0)
    assert not folder.exists()


def test_a_run_that_goes_on_leaves_later_checkpoints_behind(tmp_path: Path):
    for step in (5, 10, 20):
        written(tmp_path, step, 0, 1)
    (written(tmp_path, 20, 1) / "rank-1.json").unlink()  # rank 1 died before its last file
    resume.forget_after(tmp_path, 0, 10)
    resume.forget_after(tmp_path, 1, 10)
    assert resume.steps_saved(tmp_path, 0) == resume.steps_saved(tmp_path, 1) == [5, 10]
    assert not (tmp_path / resume.FOLDER / "step-00000020").exists()


def test_copies_of_checkpoints_are_left_alone(tmp_path: Path):
    for step in (5, 10):
        written(tmp_path, step, 0)
    kept = [f"step-{name}" for name in ("00000010-backup", "best", "7", "000000010")]
    for name in kept:
        shutil.copytree(tmp_path / resume.FOLDER / "step-00000010", tmp_path / resume.FOLDER / name)
    assert resume.steps_saved(tmp_path, 0) == [5, 10]
    resume.forget_after(tmp_path, 0, 5)
    resume.clear(tmp_path, 0)
    assert sorted(f.name for f in (tmp_path / resume.FOLDER).iterdir()) == sorted(kept)
    assert all((tmp_path / resume.FOLDER / name / "rank-0.json").exists() for name in kept)


def job(out: Path, **options: object) -> SimpleNamespace:
    """Return what a launcher knows of a run of two ranks that goes on from a checkpoint."""
    config = TrainConfig(out=str(out), resume=True, **options)
    batches = Batches(100, config.batch, config.planned_steps, config.epochs, config.seed)
    return SimpleNamespace(config=config, steps=100, digest="d", source=MODEL, batches=batches)


def past(made: SimpleNamespace, steps: int) -> list[tuple[list[int], float]]:
    """Return samples and learning rates of the first ``steps``."""
    config, batches = made.config, list(made.batches)
    rates = (scheduled_rate(config, step, len(batches)) for step in range(1, len(batches) + 1))
    return [(ids.tolist(), rate) for ids, rate in zip(batches, rates, strict=True)][:steps]


def test_what_does_not_change_the_past_may_change(tmp_path: Path):
    """More passes or steps, wherever samples and learning rates up to here would be the same; evaluations."""
    lengths = [{"epochs": 2}, {"epochs": 3}, {"steps": 24}, {"steps": 36}, {"steps": 12, "epochs": 2}]
    lengths += [{"steps": 18, "epochs": 3}, {"steps": 24, "epochs": 2}]
    free = 0
    for schedule in ("constant", "cosine"):
        for old in lengths:
            before = job(tmp_path, lr_schedule=schedule, **old)
            folder = written(tmp_path, 4, 0, 1)
            saved = {"config": before.config.to_dict(), "data": "d", "model": "m"}
            for rank in range(2):
                (folder / f"rank-{rank}.json").write_text(json.dumps(saved))
            resume.check(job(tmp_path, lr_schedule=schedule, eval_samples=3, eval_every=1, **old))
            for new in lengths:
                now = job(tmp_path, lr_schedule=schedule, **new)
                steps = min(len(before.batches), len(now.batches))
                if past(now, steps) == past(before, steps):
                    resume.check(now)
                    free += new != old
                else:
                    with pytest.raises(InputError, match="the checkpoint was made with --"):
                        resume.check(now)
    assert free >= 10


def test_a_launcher_refuses_to_go_on_from_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(training_launch, "prepare", lambda config: job(tmp_path))
    monkeypatch.setattr(
        training_launch, "launcher_of", lambda config: pytest.fail("ranks are about to start")
    )
    written(tmp_path, 4, 0)  # of rank 0 alone
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="--resume: no checkpoint of all ranks in"):
        training_launch.launch(job(tmp_path).config)


def test_a_launcher_refuses_another_run_s_checkpoint(tmp_path: Path):
    for step in (4, 8):
        folder = written(tmp_path, step, 0, 1)
        for rank in range(2):
            saved = {"config": TrainConfig(out="elsewhere").to_dict(), "data": "d", "model": "m"}
            (folder / f"rank-{rank}.json").write_text(json.dumps(saved))
    resume.check(job(tmp_path))
    with pytest.raises(InputError, match=r"made with --lr 2e-05, this run asks for 0\.5"):
        resume.check(job(tmp_path, lr=0.5))
    resume.check(job(tmp_path, lr=2e-5, model="moved/elsewhere", data="too"))
    for name in ("model", "data"):
        changed = job(tmp_path, **{name: "here"})
        changed.source, changed.digest = (OTHER, "d") if name == "model" else (MODEL, "other")
        with pytest.raises(InputError, match=f"--{name} here is not what the checkpoint was made with"):
            resume.check(changed)
    (folder / "rank-1.json").write_text("{")
    with pytest.raises(InputError, match=r"step-00000008 cannot be read .* remove it"):
        resume.check(job(tmp_path))


def test_a_killed_run_is_told_of_a_checkpoint_only_where_there_is_one(tmp_path: Path):
    assert training_launch._again(tmp_path, 2) == "start again"
    written(tmp_path, 8, 0)
    written(tmp_path, 4, 0, 1)
    assert training_launch._again(tmp_path, 2) == "start again, with --resume from the checkpoint of step 4"


def test_two_ranks_leave_checkpoints_behind_at_the_same_time(tmp_path: Path):
    for _ in range(50):
        folders = [written(tmp_path, step, 0, 1) for step in (5, 6, 7)]
        (folders[0] / ".rank-1.safetensors.1234abcd.part").write_text("")  # killed while it wrote
        ranks = [threading.Thread(target=resume.forget_after, args=(tmp_path, r, 5)) for r in (0, 1)]
        for thread in ranks:
            thread.start()
        resume.clear(tmp_path / "none", 0)
        for thread in ranks:
            thread.join()
        assert [f.exists() for f in folders] == [True, False, False]
    resume.clear(tmp_path, 0)
    resume.clear(tmp_path, 1)
    assert not list((tmp_path / resume.FOLDER).iterdir())


class Ends:
    """A stage as far as checkpoints see it: something trained, and both ends of a direction, on disk."""

    stage_index = 0

    def __init__(self, memory: int = MEMORY):
        self.submod = torch.nn.Linear(2, 2)
        self.sender = Sender(Scheme(memory=Delta()), DiskStore(memory=memory))
        self.receiver = Receiver(DiskStore(memory=memory))

    def visit(self, key: int, value: float):
        packet, _ = self.sender.encode(torch.full((1, VALUES), value), [key])
        return self.receiver.decode(packet)

    def reference_states(self):
        return {"send": self.sender.states(), "recv": self.receiver.states()}

    def load_reference_states(self, ends):
        self.sender.load_states(ends["send"])
        self.receiver.load_states(ends["recv"])

    def close(self):
        self.sender.close()
        self.receiver.close()


def checkpoints(out: Path, stage: Ends) -> resume.Checkpoints:
    job = SimpleNamespace(
        config=TrainConfig(out=str(out)), digest="d", source=MODEL, cut=[range(1), range(1)]
    )
    optimiser = torch.optim.AdamW(stage.submod.parameters())
    return resume.Checkpoints(job, 0, [stage], optimiser)


def megabytes(name: str) -> float:
    """Return a field of this process's memory: VmRSS, or VmHWM, its peak."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1000


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_references_on_disk_are_saved_and_restored_in_bounded_memory(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(resume, "PIECE", PIECE)
    stage, again = Ends(), Ends()
    for key in range(SAMPLES):
        stage.visit(key, float(key))
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        pytest.skip("this system does not let the peak of memory be reset")
    before = megabytes("VmRSS")
    checkpoints(tmp_path, stage).save(1, {"n": 1})
    assert checkpoints(tmp_path, again).load(1) == {"n": 1}
    grown = megabytes("VmHWM") - before
    held = sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors")) / 1e6
    assert held > 2 * SAMPLES
    assert grown < held / 4, f"{grown:.0f} MB for {held:.0f} MB of references"
    for key in (0, 57, SAMPLES - 1):  # a delta to the reference restored, at both ends
        assert torch.equal(again.visit(key, 0.5), stage.visit(key, 0.5))
    stage.close()
    again.close()


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch):
    stage, written = Ends(), []
    for key in range(3):
        stage.visit(key, 1.0)
    real = resume.save_file

    def full(state, file):
        written.append(file)
        if len(written) == 4:
            raise OSError(28, "No space left on device")
        real(state, file)

    monkeypatch.setattr(resume, "PIECE", 1)
    monkeypatch.setattr(resume, "save_file", full)
    with pytest.raises(InputError, match="No space left"):
        checkpoints(tmp_path, stage).save(1, {})
    assert not [f for _, _, files in os.walk(tmp_path) for f in files]


def test_a_checkpoint_written_anew_does_not_count_before_its_end(tmp_path: Path, monkeypatch):
    stage = Ends()
    saving = checkpoints(tmp_path, stage)
    saving.save(4, {})
    write = resume._write_state

    def counted(*a):
        assert resume.steps_saved(tmp_path, 0) == []
        write(*a)

    monkeypatch.setattr(resume, "_write_state", counted)
    saving.save(4, {})
    assert resume.steps_saved(tmp_path, 0) == [4]
    stage.close()


def test_a_missing_piece_of_the_references_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(resume, "PIECE", 1)
    stage = Ends()
    for key in range(3):
        stage.visit(key, 1.0)
    checkpoints(tmp_path, stage).save(1, {})
    next(tmp_path.rglob("*recv.00001.safetensors")).unlink()
    with pytest.raises(InputError, match=r"recv\.00001.* remove it to go on from an older one"):
        checkpoints(tmp_path, Ends()).load(1)
