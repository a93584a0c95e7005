"""What a run saves on its way, and runs that go on by themselves."""

import contextlib
import errno
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launchers import Command, metrics, record, sentence, until, warm
from texts import write_text

from thinwire.files.checkpoint import INDEX, read_checkpoint
from thinwire.runs.models.folder import put_in_place, shard_name
from thinwire.uses.training.run import export


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    text = write_text(tmp_path_factory.mktemp("data") / "text.txt")
    return [
        *("train", "--model", "gpt2-lab", "--data", text, "--batch", 4, "--microbatches", 2, "--seq", 32),
        *("--eval-samples", 0, "--threads", 1, "--dtype", "fp32", "--no-tensorboard", "--quiet"),
    ]


def done(command: Command) -> None:
    assert command.wait() == 0, command.err


def together(place: Path, *args: Any, each: Any = lambda rank: ()) -> None:
    """Run two ranks to their end."""
    for command in warm().ranks(place, *args, each=each):
        done(command)


class Keeper:
    """Keep each model that appears in a folder, by links to its files, which nobody writes to again."""

    def __init__(self, folder: Path, place: Path) -> None:
        self._folder, self._place = folder, place
        self._over = threading.Event()
        self.kept: list[Path] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        seen: set[int] = set()
        while not self._over.wait(0.002):
            copy = self._place / str(len(seen) + 1)
            with contextlib.suppress(FileNotFoundError):  # none yet, or another takes its place just now
                inode = self._inode()
                if inode not in seen:
                    self._link(copy)
                    if self._inode() == inode:
                        seen.add(inode)
                        self.kept.append(copy)

    def _inode(self) -> int:
        return (self._folder / INDEX).stat().st_ino

    def _link(self, copy: Path) -> None:
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(parents=True)
        for file in self._folder.iterdir():
            if not file.name.startswith("."):  # what is being saved is hidden
                os.link(file, copy / file.name)

    def close(self) -> list[Path]:
        time.sleep(0.05)
        self._over.set()
        self._thread.join()
        return self.kept


def test_a_model_saved_on_the_way_is_that_of_a_run_of_so_many_steps(job: list[Any], tmp_path: Path):
    keeper = Keeper(tmp_path / "out" / "model", tmp_path / "kept")
    together(tmp_path / "a", *job, "--steps", 5, "--save-every", 2, "--out", tmp_path / "out")
    kept = keeper.close()
    assert len(kept) == 3  # after 2, 4 and 5 steps
    for steps, folder in zip((2, 5), (kept[0], kept[2]), strict=True):
        out = tmp_path / f"{steps}-steps"
        together(tmp_path / f"b-{steps}", *job, "--steps", steps, "--out", out)
        saved, wanted = read_checkpoint(folder), read_checkpoint(out / "model")
        assert saved.keys() == wanted.keys()
        assert all(torch.equal(saved[name], wanted[name]) for name in wanted)
        assert {f.name for f in folder.iterdir()} == {f.name for f in (out / "model").iterdir()}
    assert not list((tmp_path / "out").glob(".*"))


def test_what_saving_took_is_counted_over_a_resume(job: list[Any], tmp_path: Path):
    def own(rank: int) -> tuple[Any, ...]:
        return ("--out", tmp_path / f"out-{rank}")  # as on machines that share no folder

    part = 0
    for number, (more, times) in enumerate(((("--steps", 4), 2), (("--steps", 5, "--resume"), 3))):
        args = [*job, *more, "--save-every", 2, "--checkpoint-every", 2]
        together(tmp_path / str(number), *args, each=own)
        part = part or (tmp_path / "out-0" / "model" / shard_name(1, 2)).stat().st_size
        counts = record(tmp_path / "out-0")["bytes"]
        assert times * part < counts["saving"] < 1.02 * times * part
        assert counts["control"] < 0.02 * part
    assert not (tmp_path / "out-1" / "model").exists() and not list((tmp_path / "out-1").glob(".*"))


def test_adapters_are_saved_on_the_way_without_the_model(job: list[Any], tmp_path: Path):
    out = tmp_path / "out"
    args = [*job, "--lora", 2, "--no-save-model", "--save-every", 1, "--out", out]
    run = warm().start(tmp_path / "a", *args, "--steps", 1000)
    until((out / "adapter" / "adapter_config.json").exists, "the first adapters")
    run.signal(2)
    assert run.wait() == 130
    assert sorted(f.name for f in (out / "adapter").glob("*.safetensors")) == ["adapter_model.safetensors"]
    assert not (out / "model").exists() and not list(out.glob(".*"))


def test_files_in_place_are_the_new_ones_and_those_of_others(tmp_path: Path):
    part, folder = tmp_path / ".model.part", tmp_path / "model"
    for name in ("templates/chat.jinja", shard_name(0, 2), shard_name(1, 2), INDEX):
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).write_text("new")
    gone = (
        shard_name(2, 3),
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer.model",
    )  # would be another model's
    for name in ("readme.md", "templates/mine.jinja", shard_name(0, 2), INDEX, *gone):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("old")
    put_in_place(part, folder)
    found = {str(f.relative_to(folder)): f.read_text() for f in folder.rglob("*") if f.is_file()}
    new = ("templates/chat.jinja", shard_name(0, 2), shard_name(1, 2), INDEX)
    assert found == dict.fromkeys(("readme.md", "templates/mine.jinja"), "old") | dict.fromkeys(new, "new")
    assert not part.exists()


def test_a_model_that_cannot_be_saved_leaves_the_last_one(job: list[Any], tmp_path: Path):
    out = tmp_path / "out"
    args = [*job, "--steps", 1, "--out", out]
    done(warm().run(tmp_path / "a", *args))
    before = {f.name: f.read_bytes() for f in (out / "model").iterdir()}
    # Of another model: the run is not to remove the last one, but what it began with.
    run = warm().run(tmp_path / "b", *args, "--model", out / "model", largest_file=10**6)
    assert run.wait() == 2
    assert "cannot write" in sentence(run)
    assert {f.name: f.read_bytes() for f in (out / "model").iterdir()} == before
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("others", [False, True])
def test_a_rank_whose_shard_cannot_be_written_leaves_no_folder_that_rank_0_could_not_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: bool
):
    folder = tmp_path / "model" / export.UNFINISHED
    folder.mkdir(parents=True)

    def too_large(*_args: Any) -> Path:
        if others:
            (folder / "shard of rank 0").touch()
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(export, "_sharing", lambda *_: [True, True])
    monkeypatch.setattr(export, "_module", lambda stage: stage)
    job: Any = SimpleNamespace(config=SimpleNamespace(stages=2, save_dtype="fp32"))
    world: Any = SimpleNamespace(rank=1, size=2)
    stage: Any = SimpleNamespace(stage_index=1)
    with pytest.raises(OSError, match="too large"):
        export._gather(folder, too_large, job, world, [stage], telemetry=None)  # type: ignore[arg-type]
    assert folder.parent.exists() == folder.exists() == others


def test_nothing_to_save_is_refused(job: list[Any], tmp_path: Path):
    run = warm().run(tmp_path / "a", *job, "--save-every", 2, "--no-save-model", "--out", tmp_path / "out")
    assert run.wait() == 2
    assert "--save-every is 2, but --no-save-model leaves nothing to save" in sentence(run)


def test_a_base_that_would_be_replaced_on_the_way_is_refused(job: list[Any], tmp_path: Path):
    out = tmp_path / "out"
    done(warm().run(tmp_path / "a", *job, "--steps", 1, "--out", out))
    run = warm().run(
        tmp_path / "b", *job, "--model", out / "model", "--steps", 4, "--save-every", 2, "--out", out
    )
    assert run.wait() == 2
    assert "is where --save-every would replace it" in sentence(run)


def test_a_run_begins_anew_or_goes_on_by_itself(job: list[Any], tmp_path: Path):
    out = tmp_path / "out"
    args = [*job, "--auto-resume", "--checkpoint-every", 2, "--out", out]
    for steps, notes in ((4, []), (6, ["resumed after step 4"])):
        done(warm().run(tmp_path / str(steps), *args, "--steps", steps))
        assert record(out)["notes"] == notes
        assert [step["step"] for step in metrics(out)] == [*range(1, steps + 1)]
    changed = warm().run(tmp_path / "changed", *args, "--steps", 8, "--seed", 1)
    assert changed.wait() == 2
    assert "the checkpoint was made with --seed 0, this run asks for 1" in sentence(changed)


def test_ranks_begin_anew_together_where_one_has_lost_its_checkpoints(job: list[Any], tmp_path: Path):
    def own(rank: int) -> tuple[Any, ...]:
        return ("--out", tmp_path / f"out-{rank}")

    args = [*job, "--auto-resume", "--checkpoint-every", 2, "--no-save-model"]
    lost = "begun anew: the newest checkpoints are of step 4 (rank 0) and of none (rank 1)"
    for number, (steps, note) in enumerate(((2, ""), (4, "resumed after step 2"), (1, lost), (2, lost))):
        if number == 2:
            for file in (tmp_path / "out-1" / "checkpoints").rglob("*.json"):
                file.unlink()
        together(tmp_path / str(number), *args, "--steps", steps, each=own)
        assert [n.partition(";")[0] for n in record(tmp_path / "out-0")["notes"]] == ([note] if note else [])
        assert record(tmp_path / "out-0")["totals"]["steps"] == steps
    for rank in range(2):  # those of before are gone now that there is a new one
        assert [f.name for f in (tmp_path / f"out-{rank}" / "checkpoints").iterdir()] == ["step-00000002"]


def test_checkpoints_of_another_number_of_stages_are_neither_used_nor_removed(job: list[Any], tmp_path: Path):
    args = [*job, "--auto-resume", "--checkpoint-every", 1, "--steps", 1, "--out", tmp_path / "out"]
    done(warm().run(tmp_path / "a", *args))
    changed = warm().run(tmp_path / "b", *args, "--stages", 3, "--microbatches", 4)
    assert changed.wait() == 2
    assert "the checkpoint was made with --" in sentence(changed)
    assert (tmp_path / "out" / "checkpoints" / "step-00000001").is_dir()
