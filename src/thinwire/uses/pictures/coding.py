"""How one kind of tensor is sent to the other ranks: a scheme for each step, and both ends of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.memory import NoMemory
from thinwire.channels.references import Parts, TensorStore
from thinwire.codecs import Cast, Codec, FrameChain, Raw, is_fixed_rate
from thinwire.spec import Spec
from thinwire.types import InputError, Mode, Packet, PayloadError, require
from thinwire.verdicts import Questions

MAX_WARMUP = 1000
WARM: Codec = Cast("float16")
FP16 = Scheme(WARM)
_LEAST, _MOST = torch.finfo(torch.float16).tiny, torch.finfo(torch.float16).max


def wide(codec: Codec, x: Tensor) -> Codec:
    """Return what sends ``x`` [kinds, ...] in place of float16: bfloat16 as it is, and other values raw.

    That is where float16 has no room for the values of a kind: it ends at 65,504, and has fewer bits below
    6e-5.

    >>> x = torch.ones(1, 2)
    >>> wide(WARM, x), wide(WARM, 1e5 * x), wide(WARM, x.bfloat16())
    (Cast(), Raw(), Cast(dtype='bfloat16'))
    """
    if codec != WARM or x.dtype == torch.float16:
        return codec
    if x.dtype == torch.bfloat16:
        return Cast("bfloat16")
    peaks = x.abs().flatten(1).amax(1).tolist() if x.numel() else []
    return codec if all(peak == 0 or _LEAST <= peak <= _MOST for peak in peaks) else Raw()


@dataclass(frozen=True, repr=False)
class Coding(Spec):
    """Send by ``scheme``; in the first steps of a generation another codec is in place of its own.

    In ``warmup`` steps that is float16, counting the first one, which a scheme with a mirrored memory sends
    by its keyframe codec; in ``early`` steps after them it is ``finer``. What the first steps get wrong
    weighs most in the picture [measured].

    >>> Coding(warmup=2)
    Coding(warmup=2)
    """

    scheme: Scheme = field(default_factory=Scheme)
    warmup: int = 0
    finer: Codec | None = None
    early: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("warmup", "early"):
            steps = getattr(self, name)
            wrong = f"{name}={steps} is not a number of steps in 0..{MAX_WARMUP}"
            require(steps in range(MAX_WARMUP + 1), InputError, wrong)

    def codec(self, step: int) -> Codec | None:
        """Return what replaces the scheme's codec in a generation's step, counted from 0."""
        if step < self.warmup:
            return WARM
        return self.finer if step < self.warmup + self.early else None


Shape = tuple[int, ...]


class KeptParts(TensorStore):
    """References as they were made: whoever codes here writes to nothing that it has sent or received."""

    def put(self, key: int, parts: Parts) -> None:
        self._parts[key] = parts


class Endpoints:
    """A sender, and a receiver for each of ``ranks``, which keep the references of one generation."""

    def __init__(self, coding: Coding, ranks: Iterable[int]) -> None:
        self._coding = coding
        self._sender = Sender(coding.scheme, KeptParts())
        self._receivers = {rank: Receiver(KeptParts()) for rank in ranks}
        self._forgotten: set[int] = set()
        self._sent: set[int] = set()  # keys
        self.remember = not isinstance(coding.scheme.memory, NoMemory)  # packets need references

    def encode(self, x: Tensor, keys: Sequence[int], step: int, frames: int = 1) -> tuple[Packet, Tensor]:
        """Return the packet for ``x`` in a step of the generation, and what the others will decode.

        ``frames``: in how many parts its rows are that are like each other, so that each is coded as what it
        has other than the one before; only of residuals.
        """
        scheme, mode, keyframe = self._coding.scheme, None, None
        if not self._forgotten.isdisjoint(keys):
            mode = Mode.KEYFRAME
            self._forgotten.difference_update(keys)
        codec = self._coding.codec(step) or scheme.codec
        if scheme.memory.mirrored and (mode is not None or not self._sent.issuperset(keys)):
            keyframe = wide(scheme.keyframe, x)
        else:
            codec = wide(codec, x)
        if frames > 1 and self.remember and is_fixed_rate(codec):
            codec = FrameChain(codec, frames)
        made = self._sender.encode(x, keys, codec=codec, keyframe=keyframe, mode=mode)
        self._sent.update(keys)
        return made

    def forget(self, keys: Iterable[int]) -> None:
        """Send a keyframe of these keys next; any thread may call this before their next packet is due."""
        self._forgotten.update(keys)

    def decode(
        self,
        rank: int,
        packet: Packet | None,
        keys: Sequence[int],
        shapes: Iterable[Shape],
        to: Tensor,
        later: Questions | None = None,
    ) -> Tensor:
        """Return the tensor in a packet of ``rank``, of one of these shapes, on the device of ``to``.

        ``later``: who asks that device whether it is right.
        """
        return self._receivers[rank].decode(_due(packet, keys, shapes), device=to.device, later=later)

    def replace(
        self, rank: int, packet: Packet | None, keys: Sequence[int], shapes: Iterable[Shape], to: Tensor
    ) -> Tensor:
        """Return the tensor in a packet of ``whole``, and take a keyframe of these keys next."""
        made = Receiver().decode(_due(packet, keys, shapes), device=to.device)
        self._receivers[rank].reset(keys)
        return made


_PLAIN = Sender()  # of messages that need no reference: it keeps nothing


def whole(x: Tensor, keys: Sequence[int]) -> Packet:
    """Return a packet for ``x`` as it is, which needs no reference."""
    return _PLAIN.encode(x, keys, mode=Mode.DIRECT)[0]


def mask_packet(mask: Tensor, key: int) -> Packet:
    """Return the packet for a rank's part of a mask, as it is."""
    return whole(mask.reshape(1, -1), [key])


def mask_in(packet: Packet | None, like: Tensor, tokens: int, key: int) -> Tensor:
    """Return another rank's part of a mask, which is ``like`` this one's but for its ``tokens``."""
    shape = (*like.shape[:-1], tokens)
    part = Receiver().decode(_due(packet, [key], [(1, like[..., 0].numel() * tokens)]), device=like.device)
    return part.reshape(shape).to(like.dtype)


def _due(packet: Packet | None, keys: Sequence[int], shapes: Iterable[Shape]) -> Packet:
    """Return a packet that is for these keys, and of one of these shapes. Errors: ``PayloadError``."""
    require(packet is not None, PayloadError, "an empty packet, where a share of the tokens is due")
    found: Packet = packet  # type: ignore[assignment]  # require has checked it
    if found.spec.shape not in set(shapes):
        raise PayloadError(f"a packet for {found.spec.shape}, where a share of the tokens is due")
    require([e.key for e in found.entries] == list(keys), PayloadError, "a packet for another layer")
    return found
