"""What the first rank computes for all: the same bits everywhere, and its errors too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from each import each
from meshes import Mesh, together
from torch import Tensor

import thinwire
from thinwire.types import InputError, LinkError

Meshes = dict[int, list[Mesh]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8)


def bits(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, tuple(x.shape), bytes(x.detach().contiguous().flatten().view(torch.uint8).numpy())


def told(x: Any) -> Any:
    """Return a result as what can be compared: types, and all bits."""
    if isinstance(x, Tensor):
        return bits(x)
    if isinstance(x, dict):
        return {key: told(value) for key, value in x.items()}
    return (type(x), [told(value) for value in x]) if isinstance(x, list | tuple) else (type(x), repr(x))


def on_all(ranks: list[Mesh], compute: Callable[[], Any], **options: Any) -> list[Any]:
    return together([lambda p=p: thinwire.on_first(p, compute, **options) for p in ranks])


@each("world", [2, 3])
def test_all_ranks_get_the_bits_that_the_first_one_computes(ranks: Meshes, world: int) -> None:
    g, calls = torch.Generator().manual_seed(0), list[int]()
    every = [(100 * torch.randn(3, 4, generator=g)).abs().to(dtype) for dtype in DTYPES]
    odd = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    grown = torch.ones(2, 3, requires_grad=True).t() * 2
    result = {"all": every, "odd": (odd, grown, torch.empty(0, 4)), "rest": [None, 0.1, 7, True, "a", ()]}

    def compute() -> Any:
        calls.append(1)
        return result

    for _ in range(2):
        for found in on_all(ranks[world], compute):
            assert told(found) == told(result)
    assert len(calls) == 2
    assert thinwire.on_first({}, compute) is result


@each("world", [2, 3])
def test_an_error_of_the_first_rank_reaches_all(ranks: Meshes, world: int) -> None:
    for error, kind, text in (
        (InputError("the prompt is too long; shorten it"), InputError, "rank 0: the prompt is too long"),
        (RuntimeError("no memory"), LinkError, "rank 0 has left, or ended with an error; see what it says"),
    ):

        def compute(error: Exception = error) -> None:
            raise error

        def rank(peers: Mesh, kind: type[Exception] = kind, compute: Any = compute) -> str:
            with pytest.raises((kind, RuntimeError)) as found:
                thinwire.on_first(peers, compute)
            return str(found.value)

        said = together([lambda p=p, rank=rank: rank(p) for p in ranks[world]])
        assert said[0] == str(error) and all(text in each for each in said[1:])
    for found in on_all(ranks[world], lambda: 3):  # nothing is left of those
        assert found == 3


def test_what_cannot_be_sent_is_named_on_all(ranks: Meshes) -> None:
    for result, text in (
        (
            (torch.ones(2), [print]),
            r"what the first rank computes 0\.1\.0 is of type builtin_function_or_method",
        ),
        ({"a": {1: 2}}, r"what the first rank computes 0\.a has keys that are no text"),
        (torch.ones(2, device="meta"), r"what the first rank computes 0 is a tensor of torch\.float32 in 1"),
    ):

        def rank(peers: Mesh, result: Any = result) -> str:
            with pytest.raises(InputError) as found:
                thinwire.on_first(peers, lambda: result)
            return str(found.value)

        first, second = together([lambda p=p, rank=rank: rank(p) for p in ranks[2]])
        assert second == f"rank 0: {first}"
        with pytest.raises(InputError, match=text):
            raise InputError(first)


def test_a_first_rank_that_says_nothing_is_named_by_the_deadline(ranks: Meshes) -> None:
    with pytest.raises(LinkError, match=r"waited 0\.5 s for what it computes for all from rank 0 \("):
        thinwire.on_first(ranks[4][1], list, deadline=0.5)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((None, list), "None are no links"),
        (({}, 3), "3 cannot be called; give a function"),
        (({}, list, 0), "a deadline of 0 is no number of seconds"),
        (({}, list, float("inf")), "a deadline of inf is no number"),
    ],
)
def test_wrong_arguments_are_refused(given: tuple[Any, ...], text: str) -> None:
    peers, compute, *deadline = given
    with pytest.raises(InputError, match=text):
        thinwire.on_first(peers, compute, **({"deadline": deadline[0]} if deadline else {}))
