"""What tests of whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest
from texts import write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to train on."""
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")
