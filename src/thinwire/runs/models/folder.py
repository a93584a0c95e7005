"""Stages to a folder that ``from_pretrained`` loads, and adapters to one that peft does."""

from __future__ import annotations

import copy
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.files.checkpoint import INDEX
from thinwire.files.lfs import is_pointer
from thinwire.replacing import PART, replacing
from thinwire.runs.models.families import as_saved, family_of, import_transformers, meta_model
from thinwire.runs.models.lora import adapter_config, adapters, merged
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.models.stage import ModelStage
from thinwire.types import InputError, MissingExtra, require

SHARDS = "model-*-of-*.safetensors"
ADAPTERS = "adapter_model.safetensors"
GENERATION = "generation_config.json"
VOCABULARIES = ("tokenizer.model", "tekken.json")  # for other programs: transformers does not write them
# What a model may have or not, and would be wrong for another.
OURS = (GENERATION, "chat_template.jinja", *VOCABULARIES)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard_name(rank: int, world: int) -> str:
    """Return the file name of one shard, counted from 1 as the hub does.

    >>> shard_name(0, 2)
    'model-00001-of-00002.safetensors'
    """
    return f"model-{rank + 1:05d}-of-{world:05d}.safetensors"


def save_stage(stage: nn.Module, folder: Path, rank: int, world: int, dtype: str = "fp32") -> Path:
    """Write the stage's parameters under their original names as shard ``rank`` of ``world``; return it.

    ``rank`` is the stage's index; adapters are merged in. ``dtype`` is a name of ``DTYPES``.
    The file appears complete or not at all. ``InputError`` where the disk is full or the folder cannot be
    written.
    """
    if isinstance(stage, ModelStage):
        tensors = as_saved(stage.model, _cast(merged(stage), dtype))
    else:
        tensors = _cast(stage.state_dict(), dtype)
    return _write(tensors, folder / shard_name(rank, world))


def save_adapters(stage: ModelStage, folder: Path, rank: int, world: int, dtype: str = "fp32") -> Path:
    """Write the stage's adapters alone, in peft's names, as shard ``rank`` of ``world``; return it."""
    return _write(_cast(adapters(stage), dtype), folder / shard_name(rank, world))


def _cast(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    return {name: t.to(DTYPES[dtype]) if t.is_floating_point() else t for name, t in tensors.items()}


def _write(tensors: dict[str, Tensor], target: Path) -> Path:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as e:
        raise MissingExtra("saving a model needs safetensors; run pip install 'thinwire[lm]'") from e
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as part:
            save_file(_apart(tensors), part, metadata={"format": "pt"})
    except (OSError, SafetensorError) as e:
        raise InputError(f"cannot write {target} ({e}); free space or give another --out") from e
    return target


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as files have them: each with values of its own, also where two are one here."""
    out: dict[str, Tensor] = {}
    seen = set[int]()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        out[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return out


def finish_model(folder: Path, source: ModelSource, world: int, dtype: str = "fp32") -> None:
    """Write index, config, generation config and tokenizer beside the ``world`` shards.

    Call it once, after every stage is saved. The config says that the embeddings are not tied, because the
    stages trained two copies. ``InputError`` if a shard is missing or the folder cannot be written.
    """
    try:
        _write_index(folder, world)
        if source.tokenizer is not None:  # as every language model has one
            _write_config(folder, source, dtype)
            _write_tokenizer(folder, source.tokenizer)
    except OSError as e:
        raise InputError(
            f"cannot write {folder} ({e.strerror or e}); free space or give another --out"
        ) from e


def write_bare_model(folder: Path, source: ModelSource, weights: bool) -> None:
    """Write config and tokenizer, and with ``weights`` the files that the source has them in.

    ``InputError`` where the folder cannot be written.
    """
    try:
        source.config.save_pretrained(folder)
        _write_tokenizer(folder, source.tokenizer)
        for file in sorted(source.weights.glob("*.safetensors*")) if weights and source.weights else ():
            shutil.copyfile(file, folder / file.name)
    except OSError as e:
        raise InputError(f"cannot write {folder} ({e.strerror or e}); free space there") from e


def _write_index(folder: Path, world: int) -> None:
    from safetensors import safe_open

    where: dict[str, str] = {}
    total = 0
    for name in _shards(folder, world):
        with safe_open(folder / name, framework="pt") as file:
            where.update(dict.fromkeys(file.keys(), name))
        total += (folder / name).stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(folder: Path, world: int) -> list[str]:
    """Return the names of the shards; ``InputError`` for the first that is missing."""
    names = [shard_name(rank, world) for rank in range(world)]
    for name in names:
        if not (folder / name).is_file():
            raise InputError(f"{folder} lacks {name}; save every stage before the model is finished")
    return names


def finish_adapters(folder: Path, source: ModelSource, rank: int, world: int) -> None:
    """Make ``world`` shards of adapters of ``rank`` the one file that ``PeftModel.from_pretrained`` reads.

    ``InputError`` if a shard is missing or the folder cannot be written.
    """
    from safetensors.torch import load_file

    shards = _shards(folder, world)
    try:
        whole = {name: t for shard in shards for name, t in load_file(folder / shard).items()}
        _write(whole, folder / ADAPTERS)
        for shard in shards:
            (folder / shard).unlink()
        layers = family_of(source.config).layers_of(meta_model(source.config))
        config = adapter_config(layers, source.config, rank, base=source.base)
        config.inference_mode = True
        config.save_pretrained(folder)
    except OSError as e:
        raise InputError(
            f"cannot write {folder} ({e.strerror or e}); free space or give another --out"
        ) from e


def remove_model(folder: Path) -> None:
    """Remove the weights of an earlier run, of which there may have been more shards than there will be."""
    for pattern in (SHARDS, f".model-*{PART}", INDEX):
        for file in folder.glob(pattern):
            file.unlink()


def put_in_place(part: Path, folder: Path) -> None:
    """Move the files of ``part`` to ``folder``, the index last, and remove ``part``.

    Whoever has a file open goes on reading the old one, and one that opens them all meets two models only
    within these few milliseconds. What else is in ``folder`` stays, but for another model's shards
    and manners.
    """
    files = sorted(file.relative_to(part) for file in part.rglob("*") if file.is_file())
    for name in files:
        with (part / name).open("r+b") as file:
            os.fsync(file.fileno())  # or a power cut leaves new names on empty files
    for name in sorted(files, key=lambda name: name.name == INDEX):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).replace(folder / name)
    shutil.rmtree(part)
    for old in (*folder.glob(SHARDS), *(folder / name for name in OURS)):
        if old.relative_to(folder) not in files:
            old.unlink(missing_ok=True)


def check_unread(folder: Path) -> None:
    """Raise ``InputError`` where a model that is saved to ``folder`` would not be the one read from it."""
    other = folder / "model.safetensors"  # which we never write, and which from_pretrained takes first
    require(
        not other.exists(),
        InputError,
        f"{other} would be read in the place of the model saved there; move it, or take another --out",
    )


def remove_adapters(folder: Path) -> None:
    """Remove the adapters of an earlier run: they are not this run's."""
    for name in (ADAPTERS, "adapter_config.json"):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # there is none, or the user keeps something there
        folder.rmdir()


def _write_tokenizer(folder: Path, tokenizer: Any) -> None:
    tokenizer.save_pretrained(folder)
    own = tokenizer.name_or_path  # empty where it was made in memory
    for file in (Path(own) / name for name in VOCABULARIES if own):
        if file.is_file() and not is_pointer(file):
            shutil.copyfile(file, folder / file.name)


def _write_config(folder: Path, source: ModelSource, dtype: str) -> None:
    config = copy.deepcopy(source.config)
    config.tie_word_embeddings = False
    config.dtype = str(DTYPES[dtype]).removeprefix("torch.")
    config.architectures = [type(meta_model(config)).__name__]
    config.save_pretrained(folder)
    own = source.weights and source.weights / GENERATION
    if own and own.is_file():
        shutil.copyfile(own, folder / GENERATION)
    else:
        import_transformers().GenerationConfig.from_model_config(config).save_pretrained(folder)
