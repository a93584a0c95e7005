"""Rows of a cache come back within a step, exact tokens to the bit, and no bytes do harm."""

from __future__ import annotations

import random

import pytest
import torch
from correlated_rows import basis_of, correlated

from thinwire.codecs.caches.cache_rows import CacheRows
from thinwire.codecs.caches.components import Basis, Components, LayerForm, laplacian_bits
from thinwire.codecs.caches.rotations import HALVES, PAIRS, STILL, STYLES, Rotation
from thinwire.codecs.deadzone import DeadZone
from thinwire.codecs.entropy import Entropy
from thinwire.types import InputError, PayloadError

TOKENS = 300
TURN = Rotation(HALVES, (1.0, 0.2, 0.01))
TURNS = [TURN, STILL, TURN, STILL]
HELD = correlated(TOKENS)
BASIS = basis_of(HELD)
FORMS = LayerForm(2, 8, 8, rotation=TURN), LayerForm(2, 8, 8, rotation=TURN)
COMPONENTS = Components("test", 4096, FORMS, (BASIS,))


def turned(begin: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return the columns as a model would hold them from a position on."""
    return [t.turned(x, begin).to(dtype) for t, x in zip(TURNS, HELD, strict=True)]


def weighted(basis: Basis, held: list[torch.Tensor], begin: int) -> torch.Tensor:
    plain = [t.turned(x.float(), begin, back=True) for t, x in zip(TURNS, held, strict=True)]
    rows = torch.cat([x.transpose(0, 1).flatten(1) for x in plain], 1)
    return (rows - basis.mean) @ basis.analysis


@pytest.mark.parametrize("begin", [0, 1000])
@pytest.mark.parametrize("bits", [6.0, 2.0, 0.5])
def test_each_component_errs_by_less_than_a_step(bits: float, begin: int) -> None:
    code = CacheRows(COMPONENTS.step(bits), first=4, last=16)
    held = turned(begin)
    data = code.encode(BASIS, TURNS, held, begin)
    back = code.decode(BASIS, TURNS, data, (TOKENS, begin), torch.float32)
    errors = (weighted(BASIS, held, begin) - weighted(BASIS, back, begin)).abs()
    sizes = weighted(BASIS, held, begin).abs()
    rank = code.rank(BASIS)
    rounding = 2.0**-6 * sizes.amax()  # where products are of bfloat16
    assert (errors[:, :rank] <= (1 - code.offset) * code.step + rounding).all()
    assert (errors[:, rank:] <= sizes[:, rank:] + rounding).all()
    start, stop = code.coded(TOKENS, begin)
    assert (start, stop) == (0 if begin else 4, TOKENS - 16)
    assert all(torch.equal(x[:, stop:], y[:, stop:]) for x, y in zip(held, back, strict=True))
    assert code.encode(BASIS, TURNS, held, begin) == data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_few_tokens_are_exact_in_any_dtype(dtype: torch.dtype) -> None:
    held = [x[:, :20] for x in turned(dtype=dtype)]
    code = CacheRows(1.0, first=4, last=16)
    back = code.decode(BASIS, TURNS, code.encode(BASIS, TURNS, held, 0), (20, 0), dtype)
    assert all(torch.equal(x, y) and y.dtype == dtype for x, y in zip(held, back, strict=True))


def test_components_take_the_bits_that_are_asked_for() -> None:
    many = correlated(4096)
    basis = basis_of(many)
    components = Components("test", 4096, (LayerForm(2, 8, 8),) * 2, (basis,))
    for bits in (3.0, 1.0):
        code = CacheRows(components.step(bits), first=0, last=0)
        data = code.encode(basis, [STILL] * 4, many, 0)
        assert 0.7 * bits < 8 * len(data) / sum(x.numel() for x in many) < 1.25 * bits


def test_laplacian_bits_are_those_of_laplacian_levels() -> None:
    draws = torch.distributions.Laplace(0.0, 1.0).sample((1 << 16,))
    for deviation in (0.4, 2.0):
        nbytes = Entropy(DeadZone(1.0, unit="one")).encode(draws * deviation / 2**0.5).nbytes
        told = float(laplacian_bits(torch.tensor(deviation)))
        assert 8 * nbytes / len(draws) == pytest.approx(told, rel=0.04)


@pytest.mark.parametrize("style", STYLES)
def test_turns_are_undone_and_follow_from_differences(style: str) -> None:
    turn = Rotation(style, () if style == "none" else (0.9, 0.1))
    q, k = torch.randn(2, 1, 1, 6, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(turn.turned(turn.turned(k, 7), 7, back=True), k, atol=1e-6)
    near = (turn.turned(q, 12) * turn.turned(k, 10)).sum()
    far = (turn.turned(q, 5002) * turn.turned(k, 5000)).sum()
    assert torch.allclose(near, far, atol=1e-5)
    assert torch.equal(turn.turned(k, 9)[..., 4:], k[..., 4:])


def test_pairs_and_halves_are_one_turn_in_another_order() -> None:
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    order = [0, 3, 1, 4, 2, 5]
    halves, pairs = (Rotation(style, (1.0, 0.5, 0.1)) for style in (HALVES, PAIRS))
    assert torch.equal(halves.turned(x, 3)[..., order], pairs.turned(x[..., order], 3))


def test_damaged_bytes_are_refused_or_decode_to_something() -> None:
    code = CacheRows(COMPONENTS.step(2.0))
    data = code.encode(BASIS, TURNS, turned(), 0)
    draw, refused = random.Random(0), 0
    for _ in range(120):
        wrong = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            wrong[draw.randrange(len(wrong))] ^= 1 << draw.randrange(8)
        wrong = wrong[: draw.choice([len(wrong), draw.randrange(len(wrong))])]
        try:
            code.decode(BASIS, TURNS, bytes(wrong), (TOKENS, 0), torch.float32)
        except PayloadError:
            refused += 1
    assert refused > 60


def test_wrong_numbers_are_named() -> None:
    held = turned()
    held[1][0, 50, 0] = float("nan")
    with pytest.raises(InputError, match="NaN"):
        CacheRows(1.0).encode(BASIS, TURNS, held, 0)
    with pytest.raises(InputError, match=r"step=0.0 is not above 0"):
        CacheRows(0.0)
    with pytest.raises(InputError, match="last=-1 exact tokens"):
        CacheRows(1.0, last=-1)
    with pytest.raises(InputError, match=r"bits=99 is not in 0.05..12"):
        COMPONENTS.step(99)
    with pytest.raises(InputError, match="leave out a layer"):
        Components("test", 10, FORMS[:1] * 3, (BASIS,))
