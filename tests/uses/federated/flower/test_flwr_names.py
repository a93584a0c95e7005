"""The seam with Flower: what it relies on is there, and another version is refused in one sentence."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
from flower_apps import REASON

from thinwire.rounds.client_profile import Fixed
from thinwire.types import InputError, MissingExtra
from thinwire.uses.federated.flower import flwr_names
from thinwire.uses.federated.flower.strategy import Compressed


def test_without_flower_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(MissingExtra, match=r"pip install 'thinwire\[flower\]'"):
        flwr_names.check_host()


@pytest.mark.parametrize("found", ["1.41.0", "1.43.0", "1.4.2"])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: found)
    with pytest.raises(InputError, match=f"flwr {found} is not 1.42; pip install"):
        Compressed(None, Fixed(5)).start(None, None)


def test_flower_has_what_the_seam_relies_on() -> None:
    pytest.importorskip("flwr", reason=REASON)
    flwr_names.check_host()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("flwr.common.constant.ErrorCode.MOD_FAILED_PRECONDITION", None, "MOD_FAILED_PRECONDITION"),
        ("flwr.common.constant.ErrorCode", object, "ErrorCode.NODE_UNAVAILABLE"),
        ("flwr.supercore.task_identity.TaskIdentity", object, "TaskIdentity.run_id"),
        ("flwr.app.Context", lambda **values: None, "Context"),
        ("flwr.app.Metadata", lambda *values: object, "Metadata"),
    ],
)
def test_a_change_of_flower_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, words: str
) -> None:
    pytest.importorskip("flwr", reason=REASON)
    monkeypatch.setattr(name, value)
    with pytest.raises(InputError, match=words):
        flwr_names.check_host()
