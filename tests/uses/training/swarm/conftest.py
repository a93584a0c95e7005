"""For tests of swarms that fetch a model: where its kit is kept, and how much time there is to score."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.uses.training.swarm import scoring


@pytest.fixture
def own_kits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep kits and tokens of a test in a folder of its own."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def all_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score all updates, however short rounds are."""
    monkeypatch.setattr(scoring.ScoringTime, "affords", lambda self, blocks: blocks <= 150)
