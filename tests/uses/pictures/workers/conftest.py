"""Small models in a folder, as workers have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from picture_models import flux, wan


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a transformer, and one of a pipeline, which has a transformer in it."""
    folder = tmp_path_factory.mktemp("models")
    flux().save_pretrained(folder / "flux")
    wan().save_pretrained(folder / "wan" / "transformer")
    return folder
