"""Tensors to the host and back: their bits, and what crosses and waits for it."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from other_device import DEVICE, Elsewhere
from torch import Tensor

from thinwire import staging
from thinwire.types import PayloadError

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = [
    torch.device("cpu"),
    pytest.param(DEVICE, id="make-believe"),
    pytest.param(torch.device("cuda"), id="cuda", marks=cuda),
]


def every_kind() -> list[Tensor]:
    """Parts of any dtype, without a dimension, transposed, with gaps, of length 0, or with any stride."""
    x = torch.arange(60, dtype=torch.float32).reshape(5, 12) - 7.25
    dtypes = (torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.int8, torch.complex64)
    odd = torch.arange(9, dtype=torch.uint8)[::4][:1]
    return [
        *(x.to(d) for d in dtypes),
        x.t(),
        x[:, ::5],
        x[0, 0],
        x[:0],
        odd,
        torch.tensor(True),
        x.view(5, 1, 3, 4),
    ]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_any_kind_cross_in_one_copy_and_come_back_in_one(device: torch.device) -> None:
    given = every_kind()
    with Elsewhere() if device == DEVICE else nullcontext() as seen:
        there = [p.to(device) for p in given]
        if seen:
            seen.clear()
        for lead, align in ((0, 16), (5, 16), (9, 1)):
            staged = staging.to_host(there, lead, align)
            data = staged.wait()
            found, end = staging.places([p.numel() * p.element_size() for p in given], lead, align)
            assert len(data) == end and not data.readonly
            assert [bytes(v) for v in staged.views()] == [bytes(data[a : a + n]) for a, n in found]
            layout = [(p.dtype, p.numel()) for p in given]
            back = staging.to_device(bytes(data), layout, device, lead, align)
            assert all(b.device.type == device.type for b in back)
            assert all(same(a.reshape(-1), b) for a, b in zip(there, back, strict=True))
        assert all(map(same, staging.to_host(there).tensors(), given))
        if seen:
            assert (seen.to_host, seen.to_device) == (4, 3)
            assert sum("copy" in w for w in seen.waits) == 4, seen.waits  # those to the host


def test_what_is_on_the_cpu_is_not_copied() -> None:
    x, y = torch.arange(6.0), torch.arange(4)
    staged = staging.to_host([x, y[1:]])
    assert [t.data_ptr() for t in staged.tensors()] == [x.data_ptr(), y[1:].data_ptr()]
    staged.views()[0][:] = bytes(24)
    assert x.count_nonzero() == 0
    back = staging.to_device(staging.to_host([y]).wait(), [(y.dtype, 4)], "cpu")[0]
    assert torch.equal(back, y) and back.data_ptr() != y.data_ptr()


def test_a_view_holds_its_bytes_after_the_rest_is_dropped() -> None:
    with Elsewhere():
        x = torch.arange(1000).to(DEVICE)
        staged = staging.to_host([x, x])
    view, gone = staged.views()[1], weakref.ref(staged)
    del staged
    gc.collect()
    assert gone() is None and bytes(view) == torch.arange(1000).numpy().tobytes()


def test_no_parts_bytes_missing_and_parts_of_more_than_2_gib() -> None:
    assert len(staging.to_host([]).wait()) == 0 and staging.to_device(b"", [], "cpu") == []
    with pytest.raises(PayloadError, match="3 bytes for parts of 8"):
        staging.to_device(b"abc", [(torch.float32, 2)], "cpu")
    big = [3 * 2**30 + 1, 2**31, 5]
    places, end = staging.places(big, lead=7)
    assert [p.start for p in places] == [16, 3 * 2**30 + 32, 5 * 2**30 + 32] and end == 5 * 2**30 + 37
    row = staging.bytes_of(torch.empty(2**30, 3, dtype=torch.bfloat16, device="meta").t())
    assert row.shape == (6 * 2**30,) and row.dtype == torch.uint8
