"""What stands for ComfyUI in the tests: its interface as read, with small models of our own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from comfy_stand_in_models import KINDS as KINDS
from safetensors.torch import load_file
from torch import Tensor, nn

MODULES = {
    "__init__": "",
    "cli_args": "from types import SimpleNamespace\nargs = SimpleNamespace(cpu=False)",
    "sd": "from comfy_stand_in import load_diffusion_model",
    "model_management": "from comfy_stand_in import load_models_gpu",
    "patcher_extension": "from comfy_stand_in import WrappersMP",
}


@contextmanager
def installed(folder: Path) -> Iterator[Path]:
    """Have a folder in which modules of ComfyUI's names are, which can be imported in the block."""
    (folder / "comfy").mkdir(parents=True)
    for name, text in MODULES.items():
        (folder / "comfy" / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        yield folder
    finally:
        sys.path[:] = [path for path in sys.path if path != str(folder)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "comfy"]:
            del sys.modules[name]


class WrappersMP:
    SAMPLER_SAMPLE, DIFFUSION_MODEL = "sampler_sample", "diffusion_model"


class InterruptProcessingException(Exception):
    pass


ASKED = list[bool]()  # interrupts that a user has asked for


def throw_exception_if_processing_interrupted() -> None:
    if ASKED:
        ASKED.clear()
        raise InterruptProcessingException


def load_models_gpu(models: list[Any]) -> None:
    pass


class ModelPatcher:
    """Its wrappers are what a sampler is run in."""

    def __init__(self, diffusion_model: nn.Module) -> None:
        self.model = SimpleNamespace(diffusion_model=diffusion_model)
        self.wrappers: dict[str, dict[str, list[Any]]] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}

    def clone(self) -> ModelPatcher:
        made = ModelPatcher(self.model.diffusion_model)
        made.wrappers = {
            kind: {key: [*own] for key, own in keys.items()} for kind, keys in self.wrappers.items()
        }
        return made

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.get(kind, {}).pop(key, None)


def load_diffusion_model(path: str, model_options: dict[str, Any]) -> ModelPatcher:
    """Return a model of the kind that a file's name begins with."""
    made = KINDS[Path(path).name.partition("-")[0]]()
    made.load_state_dict(load_file(path))
    return ModelPatcher(made.to(model_options["dtype"]).eval().requires_grad_(False))


Each = Callable[[int], object]


@torch.inference_mode()
def sampled(
    patcher: ModelPatcher, noise: Tensor, texts: tuple[Tensor, ...], steps: int, each: Each
) -> Tensor:
    """Run a sampler with guidance in the wrappers of a model, as ``CFGGuider`` does."""
    guider = SimpleNamespace(inner_model=patcher.model, model_patcher=patcher)

    def sample(guider: Any, sigmas: Tensor, extra_args: Any, callback: Any, noise: Tensor, *_: Any) -> Tensor:
        x = noise
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            made = []
            for n, text in enumerate(texts):
                options = {**extra_args["transformer_options"], "cond_or_uncond": [n], "uuids": [object()]}
                options |= {"sample_sigmas": sigmas, "sigmas": sigma[None], "wrappers": patcher.wrappers}
                time = 1000 * sigma.expand(x.shape[0])
                model = guider.inner_model.diffusion_model
                made.append(model(x, time, context=text, control=None, transformer_options=options))
            callback(i)
            throw_exception_if_processing_interrupted()
            x = x + (after - sigma) * (2 * made[0] - made[1])
        return x

    call: Any = sample
    for own in patcher.wrappers.get(WrappersMP.SAMPLER_SAMPLE, {}).values():
        for wrapper in own:
            call = partial(wrapper, call)
    extra = {"transformer_options": patcher.model_options["transformer_options"]}
    return call(guider, torch.linspace(1, 0, steps + 1), extra, each, noise, None, None, True)
