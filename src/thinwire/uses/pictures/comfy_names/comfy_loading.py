"""Models of ComfyUI, loaded by its own code from a folder where it is installed."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.dtypes import dtype_of
from thinwire.types import InputError, require
from thinwire.uses.pictures.workers.worker_models import AskedModel

SUFFIXES = (".safetensors", ".sft")  # others are pickles, which run what is in them


class ComfyLoader:
    """Load diffusion models with the ComfyUI of a folder. Errors: ``InputError`` where there is none."""

    def __init__(self, folder: Path) -> None:
        there = (folder / "comfy" / "sd.py").is_file()
        text = f"{folder} has no comfy/sd.py; give the folder in which ComfyUI is installed"
        require(there, InputError, text)
        self._folder = folder

    def __call__(self, place: Path, asked: AskedModel, device: torch.device) -> nn.Module:
        """Return the diffusion model in a file, where ComfyUI puts it. Errors: ``InputError``."""
        text = f"{place} is no file of safetensors, and others can run programs; give one of {SUFFIXES}"
        require(place.is_file() and place.suffix in SUFFIXES, InputError, text)
        if str(self._folder) not in sys.path:
            sys.path.insert(0, str(self._folder))
        try:
            if device.type == "cpu":  # or ComfyUI looks for a card as it is imported
                import_module("comfy.cli_args").args.cpu = True
            loader: Any = import_module("comfy.sd")
            management: Any = import_module("comfy.model_management")
            patcher = loader.load_diffusion_model(str(place), model_options={"dtype": dtype_of(asked.dtype)})
            management.load_models_gpu([patcher])
            model: nn.Module = patcher.model.diffusion_model
        except (ImportError, AttributeError, TypeError) as e:
            text = f"the ComfyUI in {self._folder} is not as expected ({type(e).__name__}: {e})"
            raise InputError(f"{text}; install what it needs, or take another version of it") from e
        self._patcher = patcher  # or ComfyUI lets go of the model
        kind = type(model).__name__
        text = f"{place} is a {kind}, and the host's model a {asked.kind}; give the same model on both sides"
        require(kind == asked.kind, InputError, text)
        return model
