"""Exchanges: what the replicas of a stage say to each other, step by step: messages and sums."""

from thinwire.collectives.exchange import Exchange, GroupExchange, MeshExchange, Reduction
from thinwire.collectives.reduce import MeshReduction

__all__ = ["Exchange", "GroupExchange", "MeshExchange", "MeshReduction", "Reduction"]
