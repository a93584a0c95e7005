"""Exchanges: what the replicas of a stage say to each other, step by step: messages and sums."""

from thinwire.collectives.base import Exchange, Reduction
from thinwire.collectives.gather import MeshExchange
from thinwire.collectives.group import GroupExchange
from thinwire.collectives.reduce import MeshReduction

__all__ = ["Exchange", "GroupExchange", "MeshExchange", "MeshReduction", "Reduction"]
