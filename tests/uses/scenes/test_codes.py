"""What packed scenes are coded with: each part reads back, in the bytes that it is worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import ball

from thinwire.codecs.symbols import (
    entropy,
    pack_classes,
    pack_numbers,
    unpack_classes,
    unpack_numbers,
    unzigzag,
    zigzag,
)
from thinwire.types import ByteCursor, PayloadError
from thinwire.uses.scenes.code import orientations, vq
from thinwire.uses.scenes.code.channels import (
    ROUNDING,
    Axes,
    Channels,
    Numbers,
    class_steps,
    pack_finer,
    unpack_finer,
)
from thinwire.uses.scenes.code.morton import PositionGrid, cells_of, morton
from thinwire.uses.scenes.code.octree import pack_cells, unpack_cells
from thinwire.uses.scenes.code.raht import HaarPlan
from thinwire.uses.scenes.view.project import rotation_matrices

pytest.importorskip("zstandard")
seeds = st.integers(0, 2**32 - 1)


def surface(draw: np.random.Generator, n: int, depth: int) -> np.ndarray:
    """Return rising places of cells on a ball."""
    out = draw.normal(size=(n, 3))
    out /= np.linalg.norm(out, axis=1, keepdims=True)
    return np.unique(morton(((out + 1) / 2 * ((1 << depth) - 1)).astype(np.int32)))


@settings(derandomize=True, max_examples=40, deadline=None)
@given(seeds, st.integers(0, 3000), st.sampled_from([0.02, 0.3, 1.0, 5.0, 80.0, 1e6]))
def test_numbers_read_back(seed: int, n: int, spread: float) -> None:
    draw = np.random.default_rng(seed)
    values = (draw.laplace(0, spread, n)).astype(np.int32)
    cursor = ByteCursor(pack_numbers(zigzag(values)), "numbers")
    assert np.array_equal(unzigzag(unpack_numbers(cursor, n)), values)
    cursor.close()


@pytest.mark.parametrize(
    ("spread", "more"), [(0.1, 1.8), (0.3, 1.15), (1.0, 1.06), (8.0, 1.04), (100.0, 1.10)]
)
def test_numbers_take_little_more_than_their_entropy(spread: float, more: float) -> None:
    values = zigzag(np.random.default_rng(0).laplace(0, spread, 60000).round().astype(np.int32))
    assert 8 * len(pack_numbers(values)) < more * entropy(np.bincount(values)) + 1000


@settings(derandomize=True, max_examples=30, deadline=None)
@given(seeds, st.lists(st.integers(0, 2000), min_size=1, max_size=6))
def test_numbers_by_class_read_back(seed: int, counts: list[int]) -> None:
    draw = np.random.default_rng(seed)
    numbers = np.concatenate(
        [zigzag(draw.laplace(0, 3.0**i, n).astype(np.int32)) for i, n in enumerate(counts)]
    )
    cursor = ByteCursor(pack_classes(numbers, counts), "classes")
    assert np.array_equal(unpack_classes(cursor, counts), numbers)
    cursor.close()


@settings(derandomize=True, max_examples=20, deadline=None)
@given(seeds, st.integers(1, 2000), st.integers(1, 20))
def test_trees_read_back(seed: int, n: int, depth: int) -> None:
    codes = surface(np.random.default_rng(seed), n, depth)
    cursor = ByteCursor(pack_cells(codes, depth), "positions")
    assert np.array_equal(unpack_cells(cursor, len(codes), depth), codes)
    cursor.close()


def test_a_tree_takes_less_than_sorted_numbers() -> None:
    codes = surface(np.random.default_rng(0), 20000, 10)
    assert 8 * len(pack_cells(codes, 10)) / len(codes) < 15  # 30 each, less log2(n!) / n = 12.9


@settings(derandomize=True, max_examples=20, deadline=None)
@given(seeds, st.integers(1, 20))
def test_places_on_the_curve_are_cells(seed: int, depth: int) -> None:
    cells = np.random.default_rng(seed).integers(0, 1 << depth, (50, 3))
    assert np.array_equal(cells_of(morton(cells)), cells)


def test_grids_hold_all_positions_within_half_a_step() -> None:
    positions = ball(300).positions
    for grid in (PositionGrid.cubic(positions, 0.01), PositionGrid.fitted(positions, 8)):
        off = np.abs(grid.positions(grid.cells(positions)) - positions)
        assert (off <= np.array(grid.step) * 0.5001).all()
    for places in (positions[:1], np.zeros((4, 3), np.float32), np.float32([[0, 0, 0], [1e30, 0, 0]])):
        grid = PositionGrid.cubic(places, 0.01)
        assert np.isfinite(grid.positions(grid.cells(places))).all() and grid.depth <= 20


@settings(derandomize=True, max_examples=20, deadline=None)
@given(seeds, st.integers(1, 500), st.integers(1, 12))
def test_the_transform_keeps_energy_and_goes_back(seed: int, n: int, depth: int) -> None:
    draw = np.random.default_rng(seed)
    codes = surface(draw, n, depth)
    plan, x = HaarPlan.of(codes, depth), draw.normal(size=(len(codes), 3))
    y = plan.forward(x)
    assert np.allclose((y**2).sum(), (x**2).sum()) and np.allclose(plan.inverse(y), x, atol=1e-12)
    assert np.allclose(plan.forward(np.ones((len(codes), 1)))[plan.root], len(codes) ** 0.5)


def covariances(rotations: np.ndarray, log_scales: np.ndarray) -> np.ndarray:
    axes = rotation_matrices(rotations.astype(np.float32)) * np.exp(log_scales.T)
    return np.einsum("ikn,jkn->nij", axes, axes)


def test_the_smallest_rotation_shows_the_same_ellipsoid() -> None:
    scene = ball(400)
    rotations, scales = orientations.smallest(scene.rotations, scene.log_scales)
    assert np.allclose(
        covariances(rotations, scales), covariances(scene.rotations, scene.log_scales), atol=1e-6
    )
    assert rotations[:, 0].min() > 0.85  # 63 degrees at most
    assert np.allclose(orientations.whole(rotations[:, 1:]), rotations, atol=1e-6)


def test_euler_s_angles_go_back() -> None:
    scene = ball(400)
    back = orientations.from_euler(orientations.to_euler(scene.rotations))
    assert np.allclose(np.abs((back * orientations.unit(scene.rotations)).sum(1)), 1, atol=1e-6)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(seeds, st.integers(1, 4), st.booleans())
def test_channels_come_back_within_their_steps(seed: int, d: int, turned: bool) -> None:
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, 300, 3).tolist()
    counts[0] += 1
    values = draw.normal(2, 1, (sum(counts), d)) @ draw.normal(size=(d, d))
    axes = Axes.principal(values, np.ones(len(values))) if turned else Axes.plain(values)
    steps = class_steps(0.05, 0.15, 3)
    assert steps.tolist() == pytest.approx([0.05, 0.1, 0.15])
    fine = Channels.of(values, axes).numbers(np.arange(len(values)), steps, counts)
    found = Numbers.unpack(fine.pack(), d, counts, "colours").values()
    room = (1 - ROUNDING) * np.repeat(steps, counts)[:, None] * (1 if axes.is_plain else 1.01 * d**0.5)
    assert (np.abs(found - values) <= room + 1e-3).all()


@settings(derandomize=True, max_examples=25, deadline=None)
@given(seeds, st.integers(1, 3))
def test_finer_steps_make_coarse_numbers_the_ones_they_came_from(seed: int, parts: int) -> None:
    draw, fine = np.random.default_rng(seed), list[Numbers]()
    for _ in range(parts):
        counts = draw.integers(0, 200, 3).tolist()
        values = draw.laplace(0, 0.3, (sum(counts) + 1, 2))
        counts[0] += 1
        channels = Channels.of(values, Axes.plain(values))
        fine.append(channels.numbers(np.arange(len(values)), class_steps(0.05, 0.15, 3), counts))
    coarse = [numbers.coarser(0.2) for numbers in fine]
    assert coarse[0].steps.tolist() == pytest.approx([0.15, 0.1, 0.15])  # three times 0.1 is too much
    assert max(np.abs(a.values() - b.values()).max() for a, b in zip(coarse, fine, strict=True)) <= 0.0501
    for found, numbers in zip(unpack_finer(pack_finer(coarse, fine), coarse, "x"), fine, strict=True):
        assert np.array_equal(found.columns, numbers.columns)
        assert found.steps.tolist() == pytest.approx(numbers.steps.tolist())


def test_finer_steps_cost_little_more_than_those_at_once() -> None:
    values = np.random.default_rng(0).laplace(0, 0.3, (20000, 2))
    channels = Channels.of(values, Axes.plain(values))
    fine = channels.numbers(np.arange(20000), class_steps(0.05, 1, 1), [20000])
    coarse = fine.coarser(1)
    assert len(coarse.pack()) + len(pack_finer([coarse], [fine])) < 1.04 * len(fine.pack())


def test_principal_axes_take_fewer_bytes() -> None:
    draw = np.random.default_rng(0)
    values = draw.normal(size=(5000, 1)) + draw.normal(0, 0.1, (5000, 3))
    sizes = [
        len(Channels.of(values, axes).numbers(np.arange(5000), class_steps(0.05, 1, 1), [5000]).pack())
        for axes in (Axes.plain(values), Axes.principal(values, np.ones(5000)))
    ]
    assert sizes[1] < 0.75 * sizes[0]


def test_books_hold_what_weighs_most() -> None:
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(2000, 4)).astype(np.float32)
    weights = np.where(vectors[:, 0] > 0, 100.0, 1.0)
    book = vq.learn(vectors, weights, 32, 40)
    off = ((vectors - book[vq.nearest(vectors, book)]) ** 2).sum(1)
    assert off[vectors[:, 0] > 0].mean() < 0.8 * off[vectors[:, 0] < 0].mean()
    assert off.mean() < 0.6 * (vectors**2).sum(1).mean()


def test_wrong_bytes_are_told() -> None:
    codes = surface(np.random.default_rng(0), 50, 6)
    data = pack_cells(codes, 6)
    for n in (len(codes) - 1, len(codes) + 1):
        with pytest.raises(PayloadError):
            unpack_cells(ByteCursor(data, "positions"), n, 6)
    with pytest.raises(PayloadError, match="unknown form 77"):
        unpack_numbers(ByteCursor(b"M" + data, "numbers"), 5)
