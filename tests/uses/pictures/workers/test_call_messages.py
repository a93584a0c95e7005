"""Calls as messages: what goes in comes out, what was there lately is not sent again, no other is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.types import InputError, PayloadError
from thinwire.uses.pictures.workers.call_messages import (
    CALLS,
    KEPT,
    CallReader,
    CallWriter,
    HostCall,
    HostTurn,
)

CPU = torch.device("cpu")


def inputs(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(2, 5, 3, generator=g).bfloat16(),
        "mask": [torch.tensor([True, False]), (torch.randn(4, 3, generator=g).t(), None)],
        "kwargs": {"scale": 0.5, "shapes": [[(1, 2, 3)]], "none": torch.empty(0, 4)},
        "ids": torch.arange(7),
        "timestep": torch.tensor(seed / 2),
        "return_dict": False,
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_calls_come_out_as_they_went_in_and_both_ends_forget_alike() -> None:
    writer, reader, again = CallWriter(), CallReader(CPU), torch.randn(100)
    for i in range(3 * KEPT):
        seldom = (torch.full((100,), i // (KEPT + 2)),) if i % (KEPT + 2) == 0 else ()
        call = HostCall("cond" if i % 2 else None, (again, 1, "a", *seldom), inputs(i))
        turn, found = reader.unpack(writer.pack(call))
        assert turn is HostTurn.CALL and found is not None and same(call._asdict(), found._asdict())
        assert reader._kept.keys() == writer._recent._used.keys()
    assert len(reader._kept) <= KEPT * 10


def test_a_tensor_is_sent_again_once_it_was_not_used_for_some_calls() -> None:
    writer, x = CallWriter(), torch.randn(1000)
    sizes = [len(writer.pack(HostCall(None, (x,) if used else (), {}))) for used in (1, 1, *[0] * KEPT, 1)]
    assert [size > x.nbytes for size in sizes] == [True, False, *[False] * KEPT, True]


WRONG = [
    ({"draw": print}, "the input draw is of type builtin_function_or_method"),
    ({"a": {1: 2}}, "the input a has keys that are no text"),
    (
        {"x": torch.zeros(2, device="meta")},
        "the input x is a tensor of torch.float32 in 1 dimensions on meta",
    ),
    ({"x": torch.zeros(2, dtype=torch.complex128)}, "the input x is a tensor of torch.complex128"),
]


@pytest.mark.parametrize(("kwargs", "told"), WRONG)
def test_what_cannot_be_sent_is_refused_by_name(kwargs: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        CallWriter().pack(HostCall(None, (), kwargs))


def test_what_is_nested_deeper_than_is_read_is_refused() -> None:
    x: Any = torch.zeros(1)
    for _ in range(20):
        x = [x]
    with pytest.raises(InputError, match="nested deeper than 16"):
        CallWriter().pack(HostCall(None, (), {"x": x}))


GOOD = CallWriter().pack(HostCall("cond", (torch.ones(3),), {"a": [torch.zeros(2, 2), 1]}))


@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=0, max_size=3))
def test_damaged_calls_are_read_or_refused(at: int, by: bytes) -> None:
    try:
        CallReader(CPU).unpack(GOOD[:at] + by + GOOD[at + len(by) :])
    except PayloadError:
        pass


def said(**words: Any) -> bytes:
    return CALLS.pack(
        HostTurn.CALL, [json.dumps({"stream": None, "args": [], "kwargs": {}} | words).encode()]
    )


HOSTILE = [
    said(new=[["a", "float32", [1 << 40]]]),
    said(new=[], args=[{"tensor": "a"}]),
    said(new=[], args=[{}]),
    said(new=[], kwargs=[1]),
    CALLS.pack(HostTurn.CALL, [b'{"new": [], "stream": null, "kwargs": {}, "args": ' + b"[" * 10**5]),
    CALLS.pack(HostTurn.CALL, [b'{"new": [["a", "float32", [2]]]}', b"1234"]),
    CALLS.pack(HostTurn.CALL, [b'{"new": [["a", "__class__", [2]]]}', b"1234"]),
    CALLS.pack(HostTurn.CALL, []),
    b"",
]


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: repr(data[-30:]))
def test_hostile_calls_are_refused(data: bytes) -> None:
    with pytest.raises(PayloadError):
        CallReader(CPU).unpack(data)
