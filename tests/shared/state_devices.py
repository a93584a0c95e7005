"""Devices on which the tensors of small states are: the make-believe one, and a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from other_device import DEVICE, Elsewhere, Seen

from thinwire.state import layout as layouts
from thinwire.state import tensor_kinds
from thinwire.state.devices import resident

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = [pytest.param(DEVICE, id="make-believe"), pytest.param(torch.device("cuda"), id="cuda", marks=cuda)]


@contextmanager
def on(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen | None]:
    """Let even small states have several stretches; yield what crosses from and to ``device``, if counted."""
    monkeypatch.setattr(layouts, "PIECE", 64)
    monkeypatch.setattr(resident, "STRETCH", 1 << 9)
    monkeypatch.setattr(resident, "_LEAST", 9)
    if device != DEVICE:
        yield None
        return
    with monkeypatch.context() as m, Elsewhere() as seen:
        m.setattr(tensor_kinds, "_odd", lambda x: None)  # meta tensors are refused, which these say they are
        m.setattr(tensor_kinds, "check_settable", lambda *_: None)
        yield seen
