"""What clients train, by name: a small convolutional network, a logistic regression, or a user's own."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.rounds.parameters import Parameters
from thinwire.seeding import seeded
from thinwire.types import InputError, require

CNN, LOGISTIC = "cnn", "logistic"
CHANNELS, KERNEL, POOLED, WIDTH = (16, 32), 5, 4, 64
SMALL = 20  # pixels: below it, convolutions keep the size of an image, or little of it would be left
OWN = "give cnn, logistic, or module:function, which is called with a sample's shape and the classes"


def build_model(name: str, shape: Sequence[int], classes: int, seed: int = 0) -> nn.Module:
    """Return the model that ``--model`` names: samples [B, *shape] to logits [B, classes].

    ``cnn`` is for images [channels, height, width] of any size; for one channel and ten classes it has 46,730
    parameters. ``logistic`` is for any sample. ``module:function`` is a user's own. Weights are float32 and
    come from ``seed`` alone. None has batch norm: its statistics are no parameters, so they would not be
    averaged (and DAGC's experiments leave it out, [quoted]). Errors: ``InputError``, one sentence.

    >>> sum(p.numel() for p in build_model("cnn", (1, 28, 28), 10).parameters())
    46730
    """
    with seeded(seed):
        if name == LOGISTIC:
            return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))
        if name == CNN:
            return _cnn(tuple(shape), classes)
        return _own(name, tuple(shape), classes)


def _cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    images = len(shape) == 3 and min(shape[1:]) >= 2
    require(
        images, InputError, f"--model cnn takes images, not samples of shape {list(shape)}; give logistic"
    )
    first, second = CHANNELS
    margin = KERNEL // 2 if min(shape[1:]) < SMALL else 0
    model = nn.Sequential(
        nn.Conv2d(shape[0], first, KERNEL, padding=margin),
        nn.MaxPool2d(2),
        nn.ReLU(),  # after the pool, which commutes with it, there are a quarter as many values
        nn.Conv2d(first, second, KERNEL, padding=margin),
        _last_pool(shape[1:], margin),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(second * POOLED**2, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, classes),
    )
    # [measured] With weights laid out by channels, 20 images of 28 x 28 take three quarters of the time.
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own stub


def _last_pool(sides: tuple[int, ...], margin: int) -> nn.Module:
    """Return what makes the second convolution's images ``POOLED`` wide; the plain pool is the faster one."""
    less = KERNEL - 1 - 2 * margin
    left = [(side - less) // 2 - less for side in sides]
    return nn.MaxPool2d(2) if left == [2 * POOLED] * 2 else nn.AdaptiveMaxPool2d(POOLED)


def _own(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    function = _function(name)
    try:
        model = function(shape, classes)
    except Exception as e:
        raise InputError(f"--model {name} fails for samples of shape {list(shape)} ({_why(e)}); {OWN}") from e
    kind = type(model).__name__
    require(
        isinstance(model, nn.Module), InputError, f"--model {name} returns {kind}, not an nn.Module; {OWN}"
    )
    _check(name, model, shape, classes)
    return model.float()


def _function(name: str) -> Any:
    module, colon, function = name.partition(":")
    named = bool(colon and module and function)
    require(named, InputError, f"--model {name!r} is unknown; {OWN}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # a command does not look for modules where it is called
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as e:
        raise InputError(f"--model {name} cannot be imported ({_why(e)}); {OWN}") from e
    require(callable(found), InputError, f"--model {name} is no function; {OWN}")
    return found


def _check(name: str, model: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Refuse a model that clients could not train: before a run, not in the midst of it."""
    require(any(True for _ in model.parameters()), InputError, f"--model {name} has no parameters; {OWN}")
    shared = not any(isinstance(m, _BatchNorm) and m.track_running_stats for m in model.modules())
    wrong = f"--model {name} has batch norm, whose statistics clients do not exchange; take nn.GroupNorm"
    require(shared, InputError, wrong)
    parameters = Parameters(model.float())
    stood = parameters.stands()
    try:
        logits = model(torch.randn(2, *shape))
    except Exception as e:
        raise InputError(f"--model {name} takes no samples of shape {list(shape)} ({_why(e)}); {OWN}") from e
    parameters.check_kept(stood)
    found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    require(found == [2, classes], InputError, f"--model {name} returns {found}, not [2, {classes}]; {OWN}")


def _why(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
