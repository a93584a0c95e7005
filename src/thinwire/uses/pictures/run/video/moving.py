"""Clips of moving garments: how each of them goes across the canvas, and the frames that follow from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.runs.data.fashion import SIDE

MOTIONS = ("slide", "bounce", "sway")
SLIDE, BOUNCE, SWAY = range(len(MOTIONS))
FASTEST = 2.5  # pixels a frame along each axis, of a garment that slides
DRIFT = 1.0  # the same of one that bounces (sideways) or sways
PERIODS = (8.0, 20.0)  # frames of a jump, and of a swing
ANGLES = (0.25, 0.7)  # radians of a swing at its most


def moving(
    garments: Tensor, motions: Tensor, frames: int, size: tuple[int, int], draw: torch.Generator
) -> Tensor:
    """Return clips [B, frames, height, width] in 0..1 of garments uint8 [B, N, 28, 28] that move.

    ``motions`` [B, N] are numbers of ``MOTIONS``; where each starts and how fast it goes is drawn. All stay
    within the canvas of ``size``, turn back at its edges, and the brightest is in front.
    """
    batch, many = motions.shape
    places, angles = paths(motions.flatten(), frames, size, draw)
    images = (garments.float() / 255).flatten(0, 1).repeat_interleave(frames, 0)[:, None]
    where = _looked_up(places.flatten(0, 1), angles.flatten(), size)
    grid = functional.affine_grid(where, [len(images), 1, *size], align_corners=False)
    drawn = functional.grid_sample(images, grid, align_corners=False)
    return drawn.view(batch, many, frames, *size).amax(1)


def paths(
    motions: Tensor, frames: int, size: tuple[int, int], draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the centres (row, column) [N, frames, 2] in pixels, and the angles [N, frames] in radians."""
    many = len(motions)
    times = torch.arange(frames).float()
    start, speed = torch.rand(2, many, 2, generator=draw)
    phase, period, height, swing = torch.rand(4, many, 1, generator=draw)
    slides = (motions == SLIDE)[:, None]
    velocity = (2 * speed - 1) * torch.where(slides, FASTEST, DRIFT)
    low = torch.tensor([SIDE / 2, SIDE / 2])
    room = torch.tensor([float(s) for s in size]) - 2 * low
    places = low + _folded((start * room)[:, None] + velocity[:, None] * times[:, None], room)
    turns = times / (PERIODS[0] + (PERIODS[1] - PERIODS[0]) * period) + phase
    jump = 4 * (turns % 1) * (1 - turns % 1) * (0.5 + 0.5 * height)  # a parabola, in parts of the room
    bounced = low[0] + room[0] * (1 - jump)
    places[..., 0] = torch.where((motions == BOUNCE)[:, None], bounced, places[..., 0])
    angle = (ANGLES[0] + (ANGLES[1] - ANGLES[0]) * swing) * torch.sin(2 * math.pi * turns)
    return places, angle * (motions == SWAY)[:, None]


def _folded(x: Tensor, room: Tensor) -> Tensor:
    """Return x reflected at 0 and at ``room`` until it lies between them."""
    period = 2 * room.clamp(min=1e-6)
    return torch.minimum(x % period, period - x % period)


def _looked_up(places: Tensor, angles: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the maps [n, 2, 3] from the canvas's coordinates, -1 to 1, to the garment's."""
    half = torch.tensor([s / 2 for s in size])
    down, right = (half - places).unbind(1)
    cos, sin = angles.cos(), angles.sin()
    height, width = half.tolist()
    rows = [
        torch.stack((cos * width, sin * height, cos * right + sin * down), 1),
        torch.stack((-sin * width, cos * height, cos * down - sin * right), 1),
    ]
    return torch.stack(rows, 1) / (SIDE / 2)
