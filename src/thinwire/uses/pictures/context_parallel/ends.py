"""Both ends of what one rank sends to all others, and gets from each of them, in one way of coding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Sender
from thinwire.channels.memory import NoMemory
from thinwire.types import Mode, Packet, PayloadError, TensorSpec, require
from thinwire.uses.pictures.context_parallel.coding import Coding, wide

Shape = tuple[int, ...]


class Ends:
    """A sender, and a receiver for each of ``ranks``, which keep the references of one generation."""

    def __init__(self, coding: Coding, ranks: Iterable[int]) -> None:
        self._coding = coding
        self._sender = Sender(coding.scheme)
        self._receivers = {rank: Receiver() for rank in ranks}
        self._forgotten: set[int] = set()

    @property
    def remember(self) -> bool:
        """Whether packets need references, which can be lost."""
        return not isinstance(self._coding.scheme.memory, NoMemory)

    def encode(self, x: Tensor, keys: Sequence[int], step: int) -> tuple[bytes, Tensor]:
        """Return the packet for ``x`` in a step of the generation, and what the others will decode."""
        scheme, mode = self._coding.scheme, None
        codec, keyframe = wide(self._coding.codec(step) or scheme.codec, x), wide(scheme.keyframe, x)
        if not self._forgotten.isdisjoint(keys):
            mode = Mode.KEYFRAME
            self._forgotten.difference_update(keys)
        packet, x_hat = self._sender.encode(x, keys, codec=codec, keyframe=keyframe, mode=mode)
        return wire.pack(packet), x_hat

    def forget(self, keys: Iterable[int]) -> None:
        """Send a keyframe of these keys next; any thread may call this before their next packet is due."""
        self._forgotten.update(keys)

    def decode(
        self, rank: int, data: bytes | memoryview, keys: Sequence[int], shapes: Iterable[Shape], to: Tensor
    ) -> Tensor:
        """Return the tensor in a packet of ``rank``, of one of these shapes, on the device of ``to``."""
        packet = _unpacked(data, keys, shapes)
        spec = TensorSpec(packet.spec.shape)
        return self._receivers[rank].decode(packet, expect=spec, device=to.device)

    def replace(
        self, rank: int, data: bytes | memoryview, keys: Sequence[int], shapes: Iterable[Shape], to: Tensor
    ) -> Tensor:
        """Return the tensor in a packet of ``pack_whole``, and take a keyframe of these keys next."""
        packet = _unpacked(data, keys, shapes)
        made = Receiver().decode(packet, expect=TensorSpec(packet.spec.shape), device=to.device)
        self._receivers[rank].reset(keys)
        return made


def pack_whole(x: Tensor, keys: Sequence[int]) -> bytes:
    """Return a packet for ``x`` as it is, which needs no reference."""
    return wire.pack(Sender().encode(x, keys, mode=Mode.DIRECT)[0])


def pack_mask(mask: Tensor, key: int) -> bytes:
    """Return the packet for a rank's part of a mask, as it is."""
    return wire.pack(Sender().encode(mask.reshape(1, -1), [key], mode=Mode.DIRECT)[0])


def unpack_mask(data: bytes | memoryview, like: Tensor, tokens: int, key: int) -> Tensor:
    """Return another rank's part of a mask, which is ``like`` this one's but for its ``tokens``."""
    shape = (*like.shape[:-1], tokens)
    packet = _unpacked(data, [key], [(1, like[..., 0].numel() * tokens)])
    part = Receiver().decode(packet, expect=TensorSpec(packet.spec.shape), device=like.device)
    return part.reshape(shape).to(like.dtype)


def _unpacked(data: bytes | memoryview, keys: Sequence[int], shapes: Iterable[Shape]) -> Packet:
    allowed = {TensorSpec(shape) for shape in shapes}
    most = max(spec.nbytes for spec in allowed) * 2  # a value of float64 takes twice as much
    packet = wire.unpack(data, max(most, 1))
    fits = TensorSpec(packet.spec.shape) in allowed
    require(fits, PayloadError, f"a packet for {packet.spec.shape}, where a share of the tokens is due")
    require([e.key for e in packet.entries] == list(keys), PayloadError, "a packet for another layer")
    return packet
