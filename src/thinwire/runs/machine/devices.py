"""What a run computes on: a device by name, what it is and can do, and what its refusals mean.

Torch is imported where it is needed: a command's options are read without it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.dtypes import SHORT, dtype_of
from thinwire.runs.options import FORM, TAKEN
from thinwire.types import InputError, ThinwireError, require

if TYPE_CHECKING:
    import torch

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
OLDEST_BF16 = 8  # compute capability of the first cards that multiply bfloat16 themselves
DRIVER = Path("/proc/driver/nvidia/version")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_FREE = re.compile(r"of which ([\d.]+ \w+) is free")
_FULL = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
_ABSENT = ("invalid device ordinal", "not compiled with CUDA enabled", "no NVIDIA driver", "No CUDA GPUs")
_FORKED = "re-initialize CUDA in forked"
_BROKEN = ("CUDA error", "CUDNN_STATUS", "CUBLAS_STATUS", "cuDNN error", "cuBLAS error")


class DeviceFull(InputError):
    """A device has no room for what is to be computed."""


def choose(text: str, place: int = 0) -> torch.device:
    """Return the device that a text names; ``cuda`` and ``auto`` deal this machine's cards out in turn.

    ``auto``: a GPU where there is one. ``place``: the rank's number on this machine.
    Errors: ``InputError`` for a text that names none, or a device that this machine or this process lacks.

    >>> choose("cpu"), choose("cpu", place=3)
    (device(type='cpu'), device(type='cpu'))
    """
    import torch

    named = re.fullmatch(FORM, text)
    require(named is not None, InputError, f"device {text!r} is unknown; it can be {TAKEN}")
    if text == AUTO:
        text = CUDA if torch.cuda.is_available() else CPU
    kind, _, number = text.partition(":")
    if kind in (CPU, "mps"):
        require(kind == CPU or torch.backends.mps.is_available(), InputError, _absent(text, 0))
        return torch.device(kind)
    count = getattr(torch, kind).device_count()
    at = int(number) if number else place % max(count, 1)
    require(at < count, InputError, _absent(text, count))
    forked = kind == CUDA and torch.cuda._is_in_bad_fork()
    require(not forked, InputError, _forked(text))
    return torch.device(kind, at)


def check_there(text: object) -> None:
    """Raise ``InputError`` for a card that this machine lacks; of a text that is none, others say so."""
    if isinstance(text, str) and text not in (AUTO, CPU) and re.fullmatch(FORM, text):
        choose(text)


def own(text: str) -> torch.device:
    """Return the device of this rank, and make it the current one. Errors: as of ``choose``."""
    import torch

    device = choose(text, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == CUDA:
        with told():  # a driver that is too old says so here
            torch.cuda.set_device(device)
    return device


def _absent(text: str, count: int) -> str:
    import torch

    there = ", ".join(f"{text.partition(':')[0]}:{n}" for n in range(count))
    if there:
        return f"there is no device {text}, but {there}; give one of these, or --device cpu"
    if text.startswith(CUDA) and torch.version.cuda is None:
        built = f"torch {torch.__version__} is built without CUDA"
        return f"there is no device {text}: {built}; install one that is built with it, or give --device cpu"
    return f"there is no device {text} on this machine; give --device cpu, or see thinwire doctor"


def _forked(text: str) -> str:
    return (
        f"this process was forked from one that uses CUDA, so it cannot use {text}; "
        "start processes by multiprocessing's spawn"
    )


def is_card(device: torch.device) -> bool:
    """Say whether a device has memory of its own.

    >>> is_card(choose("cpu"))
    False
    """
    return device.type != CPU


def bf16_native(device: torch.device | None = None) -> bool:
    """Say whether a device, by default the processor, multiplies bfloat16 itself: else fp32 is faster."""
    import torch

    if device is not None and device.type == CUDA:
        return torch.cuda.get_device_capability(device)[0] >= OLDEST_BF16
    if device is not None and is_card(device):
        return False
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    if any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16")):
        return True
    try:
        return " bf16 " in Path("/proc/cpuinfo").read_text("utf-8").replace("\n", " ")  # Arm's feature flag
    except OSError:
        return False


def pick_dtype(asked: str, device: torch.device | None = None) -> tuple[str, str]:
    """Return ``fp32``, ``bf16`` or ``fp16`` for a ``--dtype`` on a device, and the reason in words.

    >>> pick_dtype("fp32")
    ('fp32', 'as asked')
    """
    if asked != AUTO:
        return asked, "as asked"
    what = "processor" if device is None or device.type == CPU else "GPU"
    if bf16_native(device):
        return "bf16", f"the {what} has bf16 instructions"
    return "fp32", f"the {what} has no bf16 instructions"


def compute_dtype(asked: str, device: torch.device | None = None) -> torch.dtype:
    """Return the dtype of compute for a ``--dtype`` on a device.

    >>> compute_dtype("bf16")
    torch.bfloat16
    """
    return dtype_of(SHORT[pick_dtype(asked, device)[0]])


def facts(device: torch.device) -> dict[str, Any]:
    """Return what the record says of a device: name, memory in bytes, driver, CUDA, compute capability.

    >>> facts(choose("cpu"))
    {'device': 'cpu', 'name': 'cpu'}
    """
    import torch

    if device.type != CUDA:
        return {"device": str(device), "name": device.type}
    about = torch.cuda.get_device_properties(device)
    return {
        "device": str(device),
        "name": about.name,
        "memory_bytes": about.total_memory,
        "capability": f"{about.major}.{about.minor}",
        "cuda": torch.version.cuda,
        "driver": driver(),
        "triton": triton(),
    }


def driver() -> str | None:
    """Return the version of NVIDIA's driver; ``None`` where the system does not tell."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", DRIVER.read_text("utf-8"))
    except OSError:
        return None
    return found and found[0]


def triton() -> str | None:
    """Return the version of Triton, whose kernels code on a card; ``None`` where it is not installed."""
    for package in ("triton", "triton-windows"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def free_bytes(device: torch.device) -> int | None:
    """Return what is free on a card, in bytes; ``None`` where that is not known."""
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.type == CUDA else None


def check_room(device: torch.device, nbytes: int, what: str) -> None:
    """Raise ``DeviceFull`` where a card has less free than ``what`` needs at least."""
    free = free_bytes(device)
    if free is not None and nbytes > free:
        least = f"{what} needs at least {nbytes / 1e9:.3g} GB"
        raise DeviceFull(f"{least}, and {device} has {free / 1e9:.3g} GB free; {_REMEDY}")


_REMEDY = "take a smaller batch or model, more ranks, or --device cpu"


@contextmanager
def told() -> Iterator[None]:
    """Raise what a device refuses in the block as one sentence that names the rank, an error of the tree."""
    try:
        yield
    except Exception as e:
        error = device_trouble(e) or device_trouble(e.__cause__)  # what training raised says in its own words
        if error is None:
            raise
        who = f"rank {os.environ['RANK']}: " if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else ""
        raise type(error)(f"{who}{error}") from e


def device_trouble(error: BaseException | None) -> ThinwireError | None:
    """Return what a device's refusal means as an error of the tree; ``None`` for anything else.

    >>> str(device_trouble(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))).partition(";")[0]
    'the device is full: 2.00 GiB more were needed'
    """
    if not isinstance(error, RuntimeError | AssertionError | MemoryError):
        return None
    text = str(error)
    first = text.strip().partition("\n")[0][:200]
    if isinstance(error, MemoryError) or any(words in text for words in _FULL):
        return DeviceFull(_full(text))
    if any(words in text for words in _ABSENT):
        return InputError(f"there is no such device ({first}); give --device cpu, or see thinwire doctor")
    if _FORKED in text:
        return InputError(_forked(CUDA))
    if any(words in text for words in _BROKEN):
        return ThinwireError(f"the GPU failed ({first}); start again, CUDA_LAUNCH_BLOCKING=1 shows where")
    return None


def _full(text: str) -> str:
    asked, free = _ASKED.search(text), _FREE.search(text)
    card = re.search(r"GPU (\d+)", text)
    what = f"cuda:{card[1]}" if card else "memory" if "can't allocate" in text or not text else "the device"
    needed = f": {asked[1]} more were needed" if asked else ""
    needed += f", {free[1]} were free" if asked and free else ""
    return f"{what} is full{needed}; {_REMEDY}"
