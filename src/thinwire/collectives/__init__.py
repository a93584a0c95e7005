"""Exchanges: what the replicas of a stage say to each other, step by step: messages and sums."""

from thinwire.collectives.exchange import Exchange, GroupExchange, MeshExchange, Reduction
from thinwire.collectives.reduce import GroupReduction, MeshReduction

__all__ = ["Exchange", "GroupExchange", "GroupReduction", "MeshExchange", "MeshReduction", "Reduction"]
