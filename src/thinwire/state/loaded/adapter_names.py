"""Parameters of a live model that peft has wrapped, by the names that its adapters have in peft's files."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

_BESIDE = "modules_to_save"  # a whole module that is trained beside the one that it stands for


def active_adapter(model: Any) -> str | None:
    """Return the name of the adapter that a model uses; None for a model without one, or with several."""
    known, active = getattr(model, "peft_config", None), getattr(model, "active_adapter", None)
    return active if isinstance(known, Mapping) and isinstance(active, str) and active in known else None


def saved_name(name: str, adapter: str) -> str | None:
    """Return what a parameter of an adapter is called in peft's files; None for one that is not of it.

    >>> saved_name("model.q_proj.lora_A.default.weight", "default")
    'model.q_proj.lora_A.weight'
    >>> saved_name("model.score.modules_to_save.default.bias", "default")
    'model.score.bias'
    """
    parts = name.split(".")
    if adapter not in parts[1:]:
        return None
    at = len(parts) - 1 - parts[::-1].index(adapter)
    before = parts[: at - 1] if parts[at - 1] == _BESIDE else parts[:at]
    return ".".join([*before, *parts[at + 1 :]])


def is_kept(name: str, kept: frozenset[str]) -> bool:
    """Return whether a parameter may stay as it is: ``kept`` has names and shell patterns.

    >>> is_kept("model.q_proj.weight", frozenset({"*.q_proj.*"})), is_kept("norm", frozenset())
    (True, False)
    """
    return name in kept or any(fnmatchcase(name, pattern) for pattern in kept)
