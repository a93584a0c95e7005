"""Splats that change until their pictures are those of another scene again.

Source: fine-tuning after pruning as in MesonGS, arXiv 2409.09756, and the backward pass of 3D Gaussian
Splatting, arXiv 2308.04079, by Adam; the pictures to match are rendered from the scene itself, so no
photographs are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from thinwire.similarity import mse
from thinwire.uses.scenes.refining.teacher import Teacher
from thinwire.uses.scenes.scene import Array, Splats
from thinwire.uses.scenes.view.cameras import Camera
from thinwire.uses.scenes.view.harmonics import basis
from thinwire.uses.scenes.view.look_back import look
from thinwire.uses.scenes.view.project import BEYOND, WIDER, Drawable
from thinwire.uses.scenes.view.render import render

# Of Adam, for each attribute, found on level 3 of PLAYBOT; for positions, shares of the radius.
RATES = {"positions": 4e-4, "log_scales": 0.02, "rotations": 0.004, "opacities": 0.05}
RATES |= {"colours": 0.01, "harmonics": 0.004}
BETAS, TINY = (0.9, 0.99), 1e-15
EVERY = 10  # steps from one word about them to the next
CHECKS = 6  # cameras
Back = Callable[[Splats], Splats]


def _as_they_are(splats: Splats) -> Splats:
    return splats


def refined(
    splats: Splats,
    teacher: Teacher,
    steps: int,
    share: float = 1.0,
    rounded: Back = _as_they_are,
    told: Callable[[str], None] = lambda doing: None,
    rates: Mapping[str, float] = RATES,
) -> Splats:
    """Return a scene of as many splats whose pictures are nearer to those that a teacher wants.

    ``share`` of the rates is taken. What is ``rounded`` is what pictures are of: slopes go straight through.
    A few of the teacher's cameras check it: if they see no gain, the scene comes back as it was.
    """
    held = {f.name: torch.from_numpy(getattr(splats, f.name).copy()) for f in fields(Splats)}
    scales = {"positions": teacher.radius * share}
    first = {name: rate * scales.get(name, share) for name, rate in rates.items() if held[name].numel()}
    groups = [{"params": [held[name]], "lr": rate} for name, rate in first.items()]
    adam = torch.optim.Adam(groups, betas=BETAS, eps=TINY)
    for step, at in enumerate(_order(len(teacher.cameras), steps)):
        if not step % EVERY:
            told(f"refining {splats.count:,} splats, step {step} of {steps}")
        for group, rate in zip(adam.param_groups, first.values(), strict=True):
            group["lr"] = rate * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        now = rounded(_splats(held))
        slope = slopes(now, teacher.cameras[at], teacher.wanted[at])
        same = (torch.from_numpy(now.rotations) * held["rotations"]).sum(1, keepdim=True) >= 0
        slope["rotations"] = torch.where(same, 1.0, -1.0) * slope["rotations"]  # q and -q are one rotation
        for name in first:
            held[name].grad = slope[name]
        adam.step()
    found = _splats(held)
    check = teacher.few(CHECKS)
    return found if _error(rounded(found), check) < _error(rounded(splats), check) else splats


def _error(splats: Splats, teacher: Teacher) -> float:
    """Return the mean square error of a teacher's pictures."""
    scene = Drawable.of(splats)
    pairs = zip(teacher.cameras, teacher.wanted, strict=True)
    return float(np.mean([mse(wanted, render(scene, camera)) for camera, wanted in pairs]))


def _order(cameras: int, steps: int) -> list[int]:
    """Return which camera is looked through at each step: each once, then each once more."""
    draw = np.random.default_rng(0)
    turns = [draw.permutation(cameras) for _ in range(-(-steps // cameras))]
    return np.concatenate(turns)[:steps].tolist() if turns else []


def _splats(held: Mapping[str, Tensor]) -> Splats:
    return Splats(**{name: values.numpy() for name, values in held.items()})


def slopes(splats: Splats, camera: Camera, wanted: Array) -> dict[str, Tensor]:
    """Return the slopes of the sum of squared errors of a picture by each attribute."""
    seen = look(Drawable.of(splats), camera, wanted)
    which = torch.from_numpy(seen.which)
    whole = {f.name: torch.from_numpy(getattr(splats, f.name)) for f in fields(Splats)}
    parts = {name: values[which].requires_grad_() for name, values in whole.items()}
    rows = projected(parts, camera)
    rows.backward(torch.from_numpy(seen.slopes.astype(np.float32)))
    found = dict[str, Tensor]()
    for name, values in whole.items():
        found[name] = torch.zeros_like(values)
        grad = parts[name].grad
        if grad is not None:
            found[name][which] = grad
    return found


def projected(parts: Mapping[str, Tensor], camera: Camera) -> Tensor:
    """Return x, y, a, b, c, opacity, red, green and blue [m, 9] of splats in sight, as ``project`` does."""
    turn = torch.from_numpy(camera.turn.astype(np.float32))
    directions = (parts["positions"] - torch.from_numpy(camera.place.astype(np.float32))).T
    x, y, z = turn @ directions
    u, v = x / z, y / z
    axes = _rotations(parts["rotations"]) * parts["log_scales"].exp().T
    right, down, forward = torch.einsum("ij,jkn->ikn", turn, axes)
    wide, high = (BEYOND * size / 2 / camera.focal for size in (camera.width, camera.height))
    scale = camera.focal / z
    across = scale * (right - u.clamp(-wide, wide) * forward)
    upright = scale * (down - v.clamp(-high, high) * forward)
    xx, yy = (across * across).sum(0) + WIDER, (upright * upright).sum(0) + WIDER
    xy = (across * upright).sum(0)
    inverse = 1 / (xx * yy - xy * xy).clamp(min=WIDER * WIDER)
    own = torch.cat([parts["colours"][:, None], parts["harmonics"]], 1)
    values = torch.from_numpy(basis(directions.detach().numpy(), own.shape[1] - 1))
    colours = torch.einsum("kn,nkc->cn", values, own).add(0.5).clamp(min=0)
    columns = [camera.focal * u + (camera.width / 2 - 0.5), camera.focal * v + (camera.height / 2 - 0.5)]
    columns += [yy * inverse, -xy * inverse, xx * inverse, parts["opacities"].sigmoid(), *colours]
    return torch.stack(columns, 1)


def _rotations(rotations: Tensor) -> Tensor:
    """Return matrices [3, 3, n] of rotations w, x, y, z [n, 4] of any length."""
    w, x, y, z = (rotations / rotations.norm(dim=1, keepdim=True)).T
    rows = [
        torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)]),
        torch.stack([2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)]),
        torch.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)]),
    ]
    return torch.stack(rows)
