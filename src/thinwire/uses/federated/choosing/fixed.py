"""The policy of methods that do not choose: the same steps and the same codec for all devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.codecs import Codec, Raw
from thinwire.codecs.codec import require_codec
from thinwire.spec import Spec
from thinwire.types import InputError, require
from thinwire.uses.federated.choosing.device import Assignment, Device, Situation


@dataclass(frozen=True, repr=False)
class Fixed(Spec):
    """Give all devices ``steps`` local steps and ``codec``, whatever they are.

    FedAvg, FedAsync, FedBuff and QAFeL do so. With ``TopK`` or ``HardThreshold`` it is what the methods that
    choose are compared with.

    >>> Fixed(steps=5).assign([Device(0, 0.1, samples=300)], Situation(values=1000))[0].steps
    5
    """

    steps: int = 5
    codec: Codec = Raw()  # noqa: RUF009 -- frozen

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.steps >= 1, InputError, f"steps={self.steps} is below 1; give a number of local steps")
        require_codec("codec", self.codec)

    def assign(self, devices: Sequence[Device], situation: Situation) -> Sequence[Assignment]:
        """Return the same assignment for each device."""
        same = Assignment(self.steps, self.codec, f"{self.steps} steps and one codec for all")
        return [same] * len(devices)
