"""Figures of the tests inside Flower, written as a result where ``FLOWER_RESULTS`` names a file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("flwr", "torch", "numpy", "protobuf", "typer", "rich", "thinwire")


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Yield a dict to put figures into; written only if nothing failed."""
    found: dict[str, Any] = {}
    yield found
    place = os.environ.get("FLOWER_RESULTS")
    if place and not request.session.testsfailed:
        versions = {name: metadata.version(name) for name in PACKAGES}
        machine = {"cores": os.cpu_count(), "load": [round(x, 1) for x in os.getloadavg()]}
        about = {"versions": {"python": platform.python_version(), **versions}, "machine": machine}
        Path(place).write_text(json.dumps(about | found, indent=1) + "\n")
