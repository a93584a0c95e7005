"""Publish a packed scene layer by layer: each is a version, and the next comes once the last is there."""

from __future__ import annotations

import time
from pathlib import Path

from thinwire.files.watch import LOOK
from thinwire.runs.terminal.live import Live
from thinwire.types import InputError, PayloadError
from thinwire.uses.following.outlets import Outlets
from thinwire.uses.layered import LAYERS, Layered, layered_form


def read_layered(path: Path) -> Layered:
    """Return the packed scene at a path. Errors: ``InputError`` naming it, ``OSError``."""
    try:
        return layered_form().layered(path.read_bytes())
    except PayloadError as e:
        raise InputError(f"--layers: {path} is no whole packed scene: {e}") from e


def publish_layers(scene: Layered, outlets: Outlets, live: Live, once: bool) -> None:
    """Publish all layers, each when those who follow have the one before; then, unless ``once``, stay."""
    had = outlets.history.newest.meta.get(LAYERS, 1)  # where it goes on from what an earlier one left
    for layers in range(had if isinstance(had, int) and 1 <= had <= scene.count else 1, scene.count + 1):
        outlets.publish(scene.state(layers), {LAYERS: layers})
        live.tick()
        if once:
            outlets.finish()
        elif layers < scene.count:
            while not outlets.arrived():
                outlets.check()
                time.sleep(LOOK)
    while not once:
        outlets.check()
        time.sleep(LOOK)
