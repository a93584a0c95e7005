"""Where the kernels in ``fused`` can work: on tensors of one CUDA card, where Triton is and can build them.

``there()`` is False elsewhere, and callers do the same with torch's operations: to the same bits wherever
``codec.py`` asks for the same bits. A test may ask for Triton's interpreter, which runs the kernels on the
tensors of a CPU; nobody else has it, slow as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MOST = 2**31 - 2**16  # values of a tensor: kernels count them in 32 bits
_PLAIN = nullcontext()
_built: dict[Any, Any] = {}  # kernels, by all that one is built for
_kinds = ["cuda"]  # of devices whose tensors kernels work on


def there(x: Tensor, reference: Tensor | None = None) -> bool:
    """Return whether kernels can work on ``x``, not too large, and a float32 ``reference`` beside it."""
    if x.is_cpu and "cpu" not in _kinds:  # asked for each packet: what its device is takes longer
        return False
    place = x.device
    if place.type not in _kinds or type(x) is not Tensor or x.numel() > MOST or x.is_neg():
        return False
    if reference is not None and not (
        type(reference) is Tensor and reference.device == place and reference.dtype == torch.float32
    ):
        return False
    return not torch.compiler.is_compiling() and _works(place)


@lru_cache(maxsize=64)
def _works(device: torch.device) -> bool:
    if device.type == "cuda" and torch.version.hip is not None:
        return False  # nobody has compared its bits
    try:
        from thinwire.codecs.kernels.fused import first_kernel

        with on(device):
            return first_kernel.works(device)
    except Exception:  # no Triton, no C compiler, a card that is too old: whatever it is, torch can do it
        return False


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a kernel is launched on ``device``: Triton takes the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _PLAIN
    return torch.cuda.device(device)


@contextmanager
def interpreted() -> Iterator[None]:
    """Let Triton's interpreter run the kernels on a CPU's tensors: for tests, with ``TRITON_INTERPRET=1``."""
    _kinds.append("cpu")
    _works.cache_clear()
    try:
        yield
    finally:
        _kinds.remove("cpu")
        _works.cache_clear()


@contextmanager
def without() -> Iterator[None]:
    """Leave the kernels' work to torch for a while, to compare both; no other thread may be at work."""
    kept = list(_kinds)
    _kinds.clear()
    try:
        yield
    finally:
        _kinds.extend(kept)


def launch(
    kernel: Any,
    programs: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: tuple[float, ...],
    warps: int = 4,
) -> None:
    """Run a kernel, whose parameters are ``tensors``, ``numbers`` and ``constants``, in this order.

    What Triton would find out at each call, which kernel it has built for such arguments, is kept here: half
    of the time that a call takes.
    """
    device = tensors[0].device
    kinds = tuple([(t.dtype, t.data_ptr() % 16 == 0) for t in tensors])
    key = id(kernel), device.index, kinds, tuple([(n % 16 == 0, n == 1) for n in numbers]), constants, warps
    with on(device):
        built = _built.get(key)
        if built is None:
            options = {"num_warps": warps, "enable_fp_fusion": False}
            built = kernel[programs](*tensors, *numbers, *constants, **options)
            if built is not None:  # the interpreter builds nothing
                _built[key] = built
        else:
            grid = (*programs, 1, 1)[:3]
            built[grid](*tensors, *numbers, *constants)
