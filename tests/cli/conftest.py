"""What tests of commands share."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from thinwire.runs.models import fetch


@pytest.fixture(autouse=True)
def needs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fetch nothing; record what a command in this process would have fetched if it were absent."""
    asked: list[str] = []

    def fetch_missing(names: Iterable[str], told: object) -> None:
        asked.extend(names)

    monkeypatch.setattr(fetch, "fetch_missing", fetch_missing)
    return asked
