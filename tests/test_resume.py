"""Checkpoint folders: what is whole, and what two ranks may do to one at the same time."""

from pathlib import Path

from thinwire.lab import resume


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
