"""Checkpoints of a running job: weights, optimiser and references of every rank, all of one step or none."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from thinwire.engines.pipeline import CompressedStage
from thinwire.lab.config import TrainConfig
from thinwire.lab.files import REMEDY
from thinwire.lab.record import write_json
from thinwire.store import under
from thinwire.types import InputError

FOLDER = "checkpoints"
KEPT = 2  # a rank may die while it writes the newest one
# Options that a resumed run may change.
FREE = {"out", "resume", "json", "quiet", "checkpoint_every", "eval_every", "deadline", "threads"}
FREE |= {"host", "port", "advertise", "token_file", "tensorboard", "save_model", "link"}
FREE |= {"emulate", "congestion", "references", "relay"}


def steps_saved(out: Path, rank: int) -> list[int]:
    """Return the steps of which this rank has a whole checkpoint, ascending."""
    found = (Path(out) / FOLDER).glob(f"step-*/rank-{rank}.json")
    return sorted(int(f.parent.name.removeprefix("step-")) for f in found)


def clear(out: Path, rank: int) -> None:
    """Remove this rank's checkpoints: those of an earlier run in the same folder are not this run's."""
    for step in steps_saved(out, rank):
        _drop(Path(out) / FOLDER / f"step-{step:08d}", rank)


def save(
    out: Path,
    step: int,
    rank: int,
    stages: list[CompressedStage],
    optimiser: torch.optim.Optimizer,
    config: TrainConfig,
    data: str,
    totals: dict[str, Any],
) -> None:
    """Write this rank's checkpoint after ``step`` steps. The JSON file comes last and makes it count.

    ``data`` is the digest of the samples, whose ids are the keys of the references.
    """
    folder = Path(out) / FOLDER / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"optimiser.{k}": v for k, v in _optimiser_state(optimiser).items()}
    state["rng"] = torch.get_rng_state()
    for i, stage in enumerate(stages):
        state |= {f"stage{i}.{k}": v.detach().contiguous() for k, v in stage.submod.state_dict().items()}
        state |= {f"references{i}.{k}": v.contiguous() for k, v in stage.reference_state().items()}
    _write_state(state, folder / f"rank-{rank}.safetensors")
    meta = {"step": step, "config": config.to_dict(), "data": data, "totals": totals}
    write_json(folder / f"rank-{rank}.json", meta)
    for old in steps_saved(out, rank)[:-KEPT]:
        _drop(Path(out) / FOLDER / f"step-{old:08d}", rank)


def _write_state(state: dict[str, Tensor], file: Path) -> None:
    temporary = file.with_suffix(".tmp")
    try:
        # Stages and references may share storage (tied heads, rows of one frame); the file may not.
        save_file({k: v.clone() for k, v in state.items()}, temporary)
        temporary.replace(file)
    except (OSError, SafetensorError) as e:
        temporary.unlink(missing_ok=True)
        raise InputError(f"cannot write the checkpoint {file} ({e}); {REMEDY}") from e


def _drop(folder: Path, rank: int) -> None:
    (folder / f"rank-{rank}.json").unlink(missing_ok=True)
    (folder / f"rank-{rank}.safetensors").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another rank's files are still there, or it was quicker
        folder.rmdir()


def load(
    out: Path,
    step: int,
    rank: int,
    stages: list[CompressedStage],
    optimiser: torch.optim.Optimizer,
    config: TrainConfig,
    data: str,
) -> dict[str, Any]:
    """Take over this rank's checkpoint of ``step`` and return the totals saved with it.

    Errors: ``InputError`` where the checkpoint is of another configuration or cannot be read.
    """
    folder = Path(out) / FOLDER / f"step-{step:08d}"
    try:
        saved = json.loads((folder / f"rank-{rank}.json").read_text("utf-8"))
        _check_same(saved["config"], config)
        if saved["data"] != data:
            raise InputError(f"--resume: the text of --data {config.data} has changed since; restore it")
        state = load_file(folder / f"rank-{rank}.safetensors")
        _restore(state, stages, optimiser)
        totals: dict[str, Any] = dict(saved["totals"])
        return totals
    except InputError:
        raise
    # RuntimeError, KeyError, TypeError: a whole file with something else in it
    except (OSError, SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as e:
        why = " ".join(str(e).split())[:200]
        raise InputError(
            f"the checkpoint in {folder} cannot be read ({why}); remove it to go on from an older one"
        ) from e


def _restore(
    state: dict[str, Tensor], stages: list[CompressedStage], optimiser: torch.optim.Optimizer
) -> None:
    for i, stage in enumerate(stages):
        stage.submod.load_state_dict(under(state, f"stage{i}."))
        stage.load_reference_state(under(state, f"references{i}."))
    _load_optimiser(optimiser, under(state, "optimiser."))
    torch.set_rng_state(state["rng"])


def _check_same(saved: dict[str, Any], config: TrainConfig) -> None:
    now = config.to_dict()
    # Where neither the order of the data nor the learning rate depends on where the run ends, it may move.
    fixed = config.epochs or config.lr_schedule != "constant"
    free = FREE if fixed else FREE | {"steps"}
    for key, value in saved.items():
        if key not in free and now.get(key) != value:
            raise InputError(
                f"--resume: the checkpoint was made with {key} {value!r}, this run asks for "
                f"{now.get(key)!r}; use the same or another --out"
            )


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
