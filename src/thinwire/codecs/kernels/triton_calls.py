"""Where the kernels in ``fused`` can work: on tensors of one CUDA card, where Triton is and can build them.

``there()`` is False elsewhere, and callers do the same with torch's operations: to the same bits wherever
``codec.py`` asks for the same bits. A test may ask for Triton's interpreter, which runs the kernels on the
tensors of a CPU; nobody else has it, slow as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

MOST = 2**31 - 2**16  # values of a tensor: kernels count them in 32 bits
_PLAIN = nullcontext()
_kinds = ["cuda"]  # of devices whose tensors kernels work on


def there(*tensors: Tensor) -> bool:
    """Return whether kernels can work on ``tensors``: plain ones of one device, none of them too large."""
    if torch.compiler.is_compiling():
        return False
    place = tensors[0].device
    for x in tensors:
        plain = type(x) is Tensor and x.device == place and not x.is_neg()
        if not plain or place.type not in _kinds or x.numel() > MOST:
            return False
    return _works(place)


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
