"""Runs over emulated networks, for tests of what spoils them."""

from __future__ import annotations

from typing import Any

SMALL: list[Any] = [
    *("train", "--model", "gpt2-lab", "--batch", 4, "--microbatches", 2, "--seq", 32, "--recipe", "fp32"),
    *("--threads", 1, "--dtype", "fp32", "--no-tensorboard", "--no-save-model", "--quiet"),
    *("--eval-samples", 0),
]


EMULATE = ("--emulate", "--link", "20mbit,5ms")
