"""The policy contract: what was measured where something is sent, in; how to send it, out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

Site = TypeVar("Site", contravariant=True)
Choice = TypeVar("Choice", covariant=True)


@runtime_checkable
class Policy(Protocol[Site, Choice]):
    """A pure map from an engine's sites to choices, one a site, in order; one call weighs all of a run."""

    def choose(self, sites: Sequence[Site]) -> Sequence[Choice]:
        """Return a choice for each site."""
        ...
