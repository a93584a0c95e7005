"""What a link carries: bytes in one buffer, or in several that nobody copies together."""

from __future__ import annotations

Data = bytes | bytearray | memoryview


class Parts:
    """A message that lies in several buffers, so that nobody has to copy them together.

    >>> len(Parts(b"head", b"body")), bytes(Parts(b"head", b"body"))
    (8, b'headbody')
    """

    __slots__ = ("buffers",)

    def __init__(self, *buffers: Data) -> None:
        self.buffers = buffers

    def __len__(self) -> int:
        return sum(map(len, self.buffers))

    def __bytes__(self) -> bytes:
        return b"".join(self.buffers)


Message = Data | Parts


def buffers_of(message: Message) -> tuple[Data, ...]:
    """Return the buffers that a message lies in."""
    return message.buffers if isinstance(message, Parts) else (message,)
