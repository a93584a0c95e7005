"""Findings about a device are collected and asked for once; those about the CPU at once."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from other_device import DEVICE, Elsewhere

from thinwire.verdicts import deferred, refuse


def test_findings_wait_for_nothing_until_they_are_asked_for_and_the_first_is_raised() -> None:
    undone: list[int] = []
    with Elsewhere() as seen:
        x = torch.arange(8.0).to(DEVICE)
        seen.clear()
        with deferred() as outer:
            refuse((x < 0).any(), partial(ValueError, "negative"))
            with deferred() as inner:
                refuse((x > 6).any().reshape(1), partial(ValueError, "large"))
                refuse((x > 5).any(), partial(ValueError, "later"))
            with pytest.raises(ValueError, match="at once"):
                refuse(torch.tensor(True), partial(ValueError, "at once"))  # about the CPU
        assert not seen.waits and outer and inner
        inner.undo = partial(undone.append, 1)
        outer.settle()
        with pytest.raises(ValueError, match="large"):
            inner.settle()
        assert undone == [1] and (seen.to_host, len(seen.waits)) == (2, 2)
        seen.clear()
        with pytest.raises(ValueError, match="now"):
            refuse((x > 6).any(), partial(ValueError, "now"))
        assert [w.partition(" at")[0] for w in seen.waits] == ["bool"]
