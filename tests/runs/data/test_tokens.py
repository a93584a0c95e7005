"""Tokens in Python: text in the place of bytes is refused in a sentence, wherever a token goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire.types import InputError

TEXT: Any = "a text of some length"
MODEL = torch.nn.Linear(2, 2)
WAYS: dict[str, Callable[[Path], object]] = {
    "Publisher": lambda place: thinwire.Publisher(MODEL, token=TEXT),
    "Follower": lambda place: thinwire.Follower("127.0.0.1", 7000, token=TEXT),
    "ShelfWriter": lambda place: thinwire.ShelfWriter.of(str(place), MODEL, token=TEXT),
    "ShelfReader": lambda place: thinwire.ShelfReader(str(place), token=TEXT),
    "connect_mesh": lambda place: thinwire.connect_mesh(1, 2, Addresses(), token=TEXT),
    "relay": lambda place: thinwire.connect_mesh(0, 2, None, relay="127.0.0.1:7000", token=TEXT),
}


class Addresses:
    """A store that knows where rank 0 is."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes:
        return b'["127.0.0.1", 7000, "name"]'


@pytest.mark.parametrize("way", WAYS)
def test_a_token_that_is_text_is_told_so(way: str, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"^the token is str, not bytes; give thinwire\.read_token\(\), or b"
    ):
        WAYS[way](tmp_path)


def test_python_callers_hear_of_read_token() -> None:
    with pytest.raises(InputError, match=r"needs a shared token: .*in Python token=thinwire\.read_token\(\)"):
        thinwire.Publisher(MODEL, "0.0.0.0")


def test_a_token_in_the_environment_is_the_bytes_that_a_file_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = bytes(range(128, 160))  # no text in UTF-8
    (tmp_path / "secret").write_bytes(raw + b"\n")
    monkeypatch.setenv("THINWIRE_TOKEN", os.fsdecode(raw))
    assert thinwire.read_token() == thinwire.read_token(tmp_path / "secret") == raw
