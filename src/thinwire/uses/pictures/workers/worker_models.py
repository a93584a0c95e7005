"""The model that a worker has: loaded when a host first asks for it, and kept until another is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from thinwire.dtypes import dtype_of
from thinwire.types import InputError, require
from thinwire.uses.pictures.context_parallel.divided.loading import part_of_rank
from thinwire.uses.pictures.diffusers_names.empty_model import BUILDING
from thinwire.uses.pictures.diffusers_names.tested_version import version

CONFIG, WITHIN = "config.json", "transformer"  # in a pipeline's folder, where its transformer is
MOST_CONFIG = 1 << 24  # bytes
Stamp = tuple[tuple[str, int, int], ...]


class AskedModel(NamedTuple):
    """Which model a host asks for: a name below the worker's folder, its class, its weights' type.

    ``source``: whose classes it is of. ``blocks``: how many each rank has, of which those of ``rank`` alone
    are loaded; all where none are given.
    """

    name: str
    kind: str
    dtype: str
    source: str = "diffusers"
    blocks: tuple[int, ...] = ()
    rank: int = 0


Loader = Callable[[Path, AskedModel, torch.device], nn.Module]


class KeptModel:
    """The models below a folder, of which the one that was asked for last is kept on ``device``."""

    def __init__(
        self, models: Path, device: torch.device, loaders: Mapping[str, Loader] | None = None
    ) -> None:
        self.device, self._models = device, models
        self._loaders = {"diffusers": load_diffusers, **(loaders or {})}
        self._asked: tuple[AskedModel, Stamp] | None = None
        self._model: nn.Module | None = None

    def get(self, asked: AskedModel) -> nn.Module:
        """Return a model, loaded anew where its files have changed. Errors: ``InputError``."""
        place = place_of(self._models, asked.name)
        wanted = asked, _stamp(place)
        if self._model is None or self._asked != wanted:
            text = f"this worker has no models of {asked.source}; start it with --{asked.source}"
            require(asked.source in self._loaders, InputError, text)
            self.drop()
            self._model = self._loaders[asked.source](place, asked, self.device)
            self._asked = wanted
        return self._model

    def drop(self) -> None:
        """Let go of the model."""
        self._asked = self._model = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def place_of(models: Path, name: str) -> Path:
    """Return the file or folder of that name below ``models``. Errors: ``InputError``."""
    place = (models / name).resolve()
    text = f"the model {name!r} is not below the worker's folder of models; give its name there"
    require(bool(name.strip()) and place.is_relative_to(models.resolve()), InputError, text)
    there = ", ".join(sorted(p.name for p in models.iterdir())[:8]) if models.is_dir() else ""
    text = f"{models} on the worker has no model {name!r}, but {there or 'nothing'}; copy it there"
    require(place.exists() and place != models.resolve(), InputError, text)
    return place


def load_diffusers(place: Path, asked: AskedModel, device: torch.device) -> nn.Module:
    """Load a transformer of diffusers from its folder, or that of a pipeline. Errors: ``InputError``."""
    version()
    import diffusers

    folder = place if (place / CONFIG).is_file() else place / WITHIN
    name = str(_config(folder, place).get("_class_name"))
    kind: Any = getattr(diffusers, name, None)
    fits = isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)
    require(
        fits,
        InputError,
        f"{folder} is of class {name!r:.60}, which diffusers does not have; give another model",
    )
    text = f"{folder} is a {name}, and the host's model a {asked.kind}; give the same model on both sides"
    require(name == asked.kind, InputError, text)
    if asked.blocks:
        world, dtype = len(asked.blocks), dtype_of(asked.dtype)
        part = part_of_rank(kind, folder, asked.rank, world, None, dtype, device, asked.blocks)
        return part.eval().requires_grad_(False)
    options: dict[str, Any] = {"torch_dtype": dtype_of(asked.dtype), "local_files_only": True}
    try:
        # safetensors alone: other files of weights are pickles, which run what is in them
        with BUILDING:
            model = kind.from_pretrained(folder, use_safetensors=True, **options)
    except (OSError, ValueError) as e:
        why = " ".join(str(e).split())[:200]
        raise InputError(f"{folder} cannot be loaded: {why}; see whether its files are whole") from e
    return model.eval().requires_grad_(False).to(device)


def _config(folder: Path, place: Path) -> dict[str, Any]:
    path = folder / CONFIG
    text = f"{place} has no {CONFIG}, nor a {WITHIN}/{CONFIG}; save_pretrained makes such a folder"
    require(path.is_file() and path.stat().st_size <= MOST_CONFIG, InputError, text)
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise InputError(f"{path} cannot be read: {e}; save the model anew") from e
    require(isinstance(found, dict), InputError, f"{path} is no configuration; save the model anew")
    return dict(found)


def _stamp(place: Path) -> Stamp:
    """Return what changes with the files of a model."""
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    stats = [(str(p), p.stat()) for p in files if p.is_file()]
    return tuple((name, s.st_size, s.st_mtime_ns) for name, s in stats)
