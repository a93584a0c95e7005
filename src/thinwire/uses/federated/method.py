"""A method of federated learning, as a value: when updates make a version, and how both ways are sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.channels.memory import ErrorFeedback, Memory, NoMemory
from thinwire.spec import Spec
from thinwire.uses.federated.aggregation import Rule, Synchronous
from thinwire.uses.federated.download import Download, FullDownload


@dataclass(frozen=True, repr=False)
class Method(Spec):
    """Make versions by ``rule``, send them by ``download``; with ``feedback`` nothing is dropped for good.

    >>> Method().memory
    NoMemory()
    """

    rule: Rule = field(default_factory=Synchronous)
    download: Download = field(default_factory=FullDownload)
    feedback: bool = False

    @property
    def memory(self) -> Memory:
        """What a client keeps of what it could not send."""
        return ErrorFeedback() if self.feedback else NoMemory()
