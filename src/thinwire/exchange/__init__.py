"""Exchanges: what the replicas of a stage say to each other, step by step: messages and sums."""

from thinwire.exchange.base import Exchange, Reduction
from thinwire.exchange.gather import MeshExchange
from thinwire.exchange.group import GroupExchange
from thinwire.exchange.reduce import MeshReduction

__all__ = ["Exchange", "GroupExchange", "MeshExchange", "MeshReduction", "Reduction"]
