"""A model of diffusers built by its config without its weights, and the dtypes that its loader gives them.

As tested with version 0.42.1: what ``from_pretrained`` does, of which a class says some by private names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import nn

from thinwire.types import WRONG_VALUES, InputError, MissingExtra, require

Model = TypeVar("Model", bound=nn.Module)
WEIGHTS, CONFIG = "diffusion_pytorch_model", "config.json"
# While diffusers' loader or accelerate builds a model, no module of the process gets parameters. Two at a
# time would leave it so.
BUILDING = Lock()


def check_class(kind: object) -> None:
    """Raise ``InputError`` for what is no class of models of diffusers."""
    text = f"{kind!r:.60} is no class of diffusers' transformers; give one like WanTransformer3DModel"
    good = isinstance(kind, type) and issubclass(kind, nn.Module)
    require(good and all(hasattr(kind, name) for name in ("from_config", "load_config")), InputError, text)


def without_weights(kind: type[Model], config: Mapping[str, Any], dtype: torch.dtype | None) -> Model:
    """Return a model whose parameters are on no device, and whose buffers are real.

    Errors: ``InputError`` for a config that the class does not take.
    """
    own: Any = kind
    try:
        with BUILDING, _no_memory(), _by_default(dtype):
            model: Model = own.from_config(dict(config)).eval()
    except WRONG_VALUES as e:
        text = f"its {CONFIG} makes no {kind.__name__}: {str(e)[:200]}; take a whole folder of one version"
        raise InputError(text) from e
    return model


def kept_dtype(kind: type, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a weight gets where ``dtype`` is asked for: some modules stay in float32."""
    kept = getattr(kind, "_keep_in_fp32_modules", None) or []
    kept = kept if isinstance(kept, list) else [kept]
    return torch.float32 if set(kept) & set(name.split(".")) else dtype


def is_surplus(kind: type, name: str) -> bool:
    """Return whether a tensor that the model has no place for is none of those that files may have."""
    may = getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or []
    return not any(re.search(pattern, name) for pattern in may)


@contextmanager
def _no_memory() -> Iterator[None]:
    try:
        from accelerate import init_empty_weights
    except ImportError as e:
        raise MissingExtra("loading a part needs accelerate: pip install 'thinwire[diffusion]'") from e
    with init_empty_weights(include_buffers=False):
        yield


@contextmanager
def _by_default(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
