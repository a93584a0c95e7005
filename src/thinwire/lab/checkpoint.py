"""Stages to a folder that ``from_pretrained`` loads."""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import suppress
from pathlib import Path

from thinwire.lab.families import meta_model
from thinwire.lab.models import ModelSource
from thinwire.lab.split import Stage
from thinwire.lab.weights import INDEX
from thinwire.types import InputError, MissingExtra


def shard_name(rank: int, world: int) -> str:
    """Return the file name of one shard, counted from 1 as the hub does.

    >>> shard_name(0, 2)
    'model-00001-of-00002.safetensors'
    """
    return f"model-{rank + 1:05d}-of-{world:05d}.safetensors"


def save_stage(stage: Stage, folder: Path, rank: int, world: int) -> Path:
    """Write the stage's parameters under their original names as shard ``rank`` of ``world``; return it.

    ``rank`` is the stage's index. The file appears complete or not at all. ``InputError`` where the disk is
    full or the folder cannot be written.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as e:
        raise MissingExtra("saving a model needs safetensors; run pip install 'thinwire[lm]'") from e
    names = stage.original_names()
    tensors = {names[n]: p.detach().cpu().contiguous() for n, p in stage.named_parameters()}
    target = folder / shard_name(rank, world)
    part = target.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part, metadata={"format": "pt"})
        part.replace(target)
    except (OSError, SafetensorError) as e:
        with suppress(OSError):
            part.unlink()
        raise InputError(f"cannot write {target} ({e}); free space or give another --out") from e
    return target


def finish_model(folder: Path, source: ModelSource, world: int) -> None:
    """Write index, config, generation config and tokenizer beside the ``world`` shards.

    Call it once, after every stage is saved. The config says that the embeddings are not tied, because the
    stages trained two copies. ``InputError`` if a shard is missing or the folder cannot be written.
    """
    try:
        _write_index(folder, world)
        _write_config(folder, source)
        source.tokenizer.save_pretrained(folder)
    except OSError as e:
        raise InputError(
            f"cannot write {folder} ({e.strerror or e}); free space or give another --out"
        ) from e


def _write_index(folder: Path, world: int) -> None:
    from safetensors import safe_open

    where: dict[str, str] = {}
    total = 0
    for name in (shard_name(rank, world) for rank in range(world)):
        if not (folder / name).is_file():
            raise InputError(f"{folder} lacks {name}; save every stage before the model is finished")
        with safe_open(folder / name, framework="pt") as file:
            where.update(dict.fromkeys(file.keys(), name))
        total += (folder / name).stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(folder: Path, source: ModelSource) -> None:
    config = copy.deepcopy(source.config)
    config.tie_word_embeddings = False
    config.dtype = "float32"
    config.architectures = [type(meta_model(config)).__name__]
    config.save_pretrained(folder)
    if source.weights is not None:
        generation = source.weights / "generation_config.json"
        if generation.is_file():
            shutil.copyfile(generation, folder / generation.name)
