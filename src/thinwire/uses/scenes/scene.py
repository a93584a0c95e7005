"""A scene of 3D Gaussians, as a value."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.types import InputError, require

Array = npt.NDArray[np.float32]
COEFFICIENTS = {0: 0, 3: 1, 8: 2, 15: 3}  # of spherical harmonics besides the constant one, and their bands
# Splats this many times as far out as all but a few are strays, and so is what float32 cannot square.
FAR, NEARLY, FARTHEST = 1e6, 0.95, 1e15
LARGEST, BRIGHT, LONG = 43.0, 1000.0, 1e9  # log-scales, coefficients, rotations: beyond, nothing looks other
ADVICE = "give a scene as 3D Gaussian Splatting saves it"


@dataclass(frozen=True, eq=False)
class Splats:
    """A scene of ``n`` Gaussians, all arrays float32.

    ``positions`` [n, 3]; ``log_scales`` [n, 3], natural logarithms of standard deviations, -inf for flat;
    ``rotations`` [n, 4] as w, x, y, z of any length; ``opacities`` [n], logits, perhaps infinite; ``colours``
    [n, 3], the constant coefficients; ``harmonics`` [n, 0, 3, 8 or 15, 3], the others, red, green and blue.
    Errors: ``InputError`` for other shapes.

    >>> one = Splats.of(np.zeros((1, 3)))
    >>> one.count, one.bands, one.nbytes
    (1, 0, 56)
    """

    positions: Array
    log_scales: Array
    rotations: Array
    opacities: Array
    colours: Array
    harmonics: Array

    def __post_init__(self) -> None:
        n = len(self.positions)
        shapes = {"positions": (n, 3), "log_scales": (n, 3), "rotations": (n, 4), "opacities": (n,)}
        for name, shape in (shapes | {"colours": (n, 3)}).items():
            found = getattr(self, name).shape
            require(found == shape, InputError, f"{name} of shape {found}, expected {shape}; {ADVICE}")
        found = self.harmonics.shape
        good = len(found) == 3 and found[0] == n and found[1] in COEFFICIENTS and found[2] == 3
        require(good, InputError, f"harmonics of shape {found}, expected [{n}, 0, 3, 8 or 15, 3]; {ADVICE}")
        for f in fields(self):
            kind = getattr(self, f.name).dtype
            require(kind == np.float32, InputError, f"{f.name} of {kind}, expected float32; convert them")

    @classmethod
    def of(cls, positions: npt.ArrayLike, **others: npt.ArrayLike) -> Splats:
        """Return a scene of these arrays, grey and of size 0.01 where nothing is said."""
        given = {"positions": positions} | others
        with np.errstate(over="ignore"):  # what is too large for a file's floats is infinite in them
            arrays = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in given.items()}
        n = len(arrays["positions"])
        default: dict[str, Any] = {
            "log_scales": np.full((n, 3), np.log(0.01), np.float32),
            "rotations": np.tile(np.array([1, 0, 0, 0], np.float32), (n, 1)),
            "opacities": np.zeros(n, np.float32),
            "colours": np.zeros((n, 3), np.float32),
            "harmonics": np.zeros((n, 0, 3), np.float32),
        }
        return cls(**(default | arrays))

    @property
    def count(self) -> int:
        """How many splats there are."""
        return len(self.positions)

    @property
    def bands(self) -> int:
        """Bands of spherical harmonics besides the constant one: 0 to 3."""
        return COEFFICIENTS[self.harmonics.shape[1]]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))

    def take(self, which: npt.NDArray[Any]) -> Splats:
        """Return the splats at these positions, or where a mask is set, in that order."""
        return Splats(**{f.name: np.ascontiguousarray(getattr(self, f.name)[which]) for f in fields(self)})


class Odd(NamedTuple):
    """How many splats of a scene are out of the ordinary."""

    dropped: int = 0  # with a NaN, or an infinity where there is no meaning for one
    far: int = 0  # dropped as well: FAR times as far out as nearly all others
    endless: int = 0  # of infinite opacity: opaque, or not to be seen
    flat: int = 0  # with a scale of zero
    turnless: int = 0  # with a rotation of zero, which becomes none


def cleaned(splats: Splats, strict: bool = False) -> tuple[Splats, Odd]:
    """Return the splats that can be shown, and counts of odd ones.

    Infinite opacities and scales of zero are kept. Splats with a NaN, an infinite position, scale, colour or
    rotation go, and those that are far beyond all others. Errors: ``InputError`` where some do and ``strict``
    is set, and where none is left.

    >>> scene = Splats.of(np.zeros((2, 3)), opacities=[np.nan, np.inf])
    >>> cleaned(scene)[1]
    Odd(dropped=1, far=0, endless=1, flat=0, turnless=0)
    """
    finite = [getattr(splats, name) for name in ("positions", "rotations", "colours", "harmonics")]
    good = ~np.isnan(splats.opacities) & (splats.log_scales < np.inf).all(1)  # a NaN is below nothing
    for array in finite:
        good &= np.isfinite(array).all(tuple(range(1, array.ndim)))
    dropped = splats.count - int(good.sum())
    told = (
        f"{dropped} of {splats.count} splats hold a NaN or a wrong infinity; leave --strict out to drop them"
    )
    require(not (dropped and strict), InputError, told)
    kept = splats.take(good) if dropped else splats
    near = _near(kept.positions) if kept.count else np.zeros(0, bool)
    told = f"the scene has no splat that can be shown, of {splats.count}; {ADVICE}"
    require(bool(near.any()), InputError, told)
    far = kept.count - int(near.sum())
    told = f"{far} of {splats.count} splats are {FAR:.0e} times as far out as the others; leave --strict out"
    require(not (far and strict), InputError, f"{told} to drop them")
    kept = _bounded(kept.take(near) if far else kept)
    zero = (kept.rotations == 0).all(1)
    if zero.any():
        kept = replace(
            kept, rotations=np.where(zero[:, None], np.array([1, 0, 0, 0], np.float32), kept.rotations)
        )
    flat = np.isneginf(kept.log_scales).any(1)
    endless = int(np.isinf(kept.opacities).sum())
    return kept, Odd(dropped, far, endless, int(flat.sum()), int(zero.sum()))


def _near(positions: Array) -> npt.NDArray[np.bool_]:
    """Return which places [n, 3] can be drawn together with nearly all others."""
    places = positions.astype(np.float64)
    away = np.abs(places - np.median(places, axis=0)).max(1)
    reach = float(np.quantile(away, NEARLY, method="higher"))
    return (away <= FAR * (reach or np.inf)) & (np.abs(places).max(1) < FARTHEST)


def _bounded(splats: Splats) -> Splats:
    """Return what looks the same in numbers that can be calculated with in float32."""
    bounds = {"log_scales": (-np.inf, LARGEST), "colours": (-BRIGHT, BRIGHT), "harmonics": (-BRIGHT, BRIGHT)}
    for name, (low, high) in bounds.items():
        values = getattr(splats, name)
        if values.size and (values.max() > high or values.min() < low):
            splats = replace(splats, **{name: np.clip(values, low, high, dtype=np.float32)})
    largest = np.abs(splats.rotations).max(1, keepdims=True)
    odd = (largest > LONG) | ((largest < 1 / LONG) & (largest > 0))
    if odd.any():
        shorter = splats.rotations / np.where(odd, largest, 1)
        splats = replace(splats, rotations=shorter.astype(np.float32))
    return splats
