"""Shared types and the error tree: the vocabulary every other floor speaks.

The errors, and the exit code the command line gives each::

    ThinwireError
    ├── InputError (also ValueError)     2   a wrong option, file or argument; the text names value and remedy
    │   └── MissingExtra                 2   an optional dependency is not installed
    ├── PayloadError                     3   bytes that are no valid packet, or do not fit what was expected
    ├── DesyncError                      3   the two ends of a channel no longer hold the same reference
    ├── LinkError                        3   a peer is lost, or did not answer in time; the text names it
    │   └── AuthError                    3   a peer without the right token
    └── MeasurementError                 4   a measurement that must not be reported as a result

Units are SI everywhere in the code: bytes, seconds, bytes per second.
"""

from __future__ import annotations

import enum
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:  # links and the emulator's relay know errors alone, and start without torch
    import torch
    from torch import Tensor


class ThinwireError(Exception):
    """Base of every error thinwire raises on purpose."""

    exit_code = 3


class InputError(ThinwireError, ValueError):
    """A bad option, argument or file. The text is one sentence: what is wrong, the value, what to do."""

    exit_code = 2


class MissingExtra(InputError):
    """An optional dependency is missing; the text names the extra to install."""


class PayloadError(ThinwireError):
    """Bytes that are not a valid packet, or a packet that does not fit what was expected."""


class DesyncError(ThinwireError):
    """The receiver's reference is not the sender's: a gap, a repetition or a failed check.

    ``keys``: reset these at the receiver, then ask the sender for a keyframe.
    """

    def __init__(self, message: str, keys: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys


class LinkError(ThinwireError):
    """A peer is gone or did not answer within the deadline. The text names the peer."""


class AuthError(LinkError):
    """A peer did not prove that it holds the shared token."""


class MeasurementError(ThinwireError):
    """A measurement is invalid and must not be reported as a result."""

    exit_code = 4


# What wrong values make Python, numpy and torch raise; from the wire, it becomes a PayloadError.
# Running out of memory is not among them: that must be prevented, not reported.
WRONG_VALUES = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError)
MAX_KEY = 1 << 63  # keys of samples are below it: references are saved by them as signed numbers


class Mode(enum.IntEnum):
    """How one entry of a frame relates to the receiver's reference."""

    DIRECT = 0  # needs no reference and leaves none
    KEYFRAME = 1  # needs no reference and sets one
    DELTA = 2  # is added to the reference and moves it


def _float32() -> torch.dtype:
    import torch

    return torch.float32


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor.

    >>> TensorSpec((2, 3)).numel
    6
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = field(default_factory=_float32)

    @classmethod
    def of(cls, x: Tensor) -> TensorSpec:
        """Return the spec of ``x``."""
        return cls(tuple(x.shape), x.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the plain tensor in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Payload:
    """An encoded tensor: the spec it decodes to, and 1-D parts that go on the wire as they are."""

    spec: TensorSpec
    parts: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, framing not included."""
        return sum(p.numel() * p.element_size() for p in self.parts)


@dataclass(frozen=True)
class Entry:
    """One sample of a frame.

    ``version`` counts the updates of the key's reference at the sender, this frame's included (0: direct).
    ``check`` is a 32-bit sum over the reconstruction, so drift is noticed at once.
    """

    key: int
    version: int
    section: int
    check: int


@dataclass(frozen=True, eq=False)
class Section:
    """The entries of a frame that share a mode and a codec; their rows are stacked in one payload."""

    mode: Mode
    codec: str
    payload: Payload


class Findings(Protocol):
    """What was found about values on a device, and is asked for later (``thinwire.verdicts``)."""

    def tensors(self) -> list[Tensor]: ...
    def settle(self, read: Sequence[Tensor] | None = None) -> None: ...


@dataclass(frozen=True, eq=False)
class Packet:
    """One self-describing message: memory, references and each section's codec are printable specs.

    ``spec`` is the whole frame's: [entries, *sample shape]; ``references`` says how states are held.
    ``verdicts``: what is still to be asked of the device that the packet is on, before it is used.
    """

    spec: TensorSpec
    memory: str
    references: str
    entries: Sequence[Entry]
    sections: tuple[Section, ...]
    verdicts: Findings | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads, framing not included."""
        return sum(s.payload.nbytes for s in self.sections)


def require(condition: bool, error: Callable[[str], Exception], message: str) -> None:
    """Raise ``error(message)`` unless ``condition`` holds."""
    if not condition:
        raise error(message)


class ByteCursor:
    """A cursor over untrusted bytes, named ``what`` in errors: every read is checked against what is left."""

    def __init__(self, data: bytes | bytearray | memoryview, what: str) -> None:
        self._data, self._at, self._what = memoryview(data).cast("B"), 0, what

    def rest(self) -> memoryview:
        """Return the bytes that were not taken, and leave them."""
        return self._data[self._at :]

    def take(self, n: int) -> memoryview:
        """Return the next ``n`` bytes."""
        left = len(self._data) - self._at
        if not 0 <= n <= left:
            raise PayloadError(f"{self._what} ends {n - left} bytes too early: it was cut")
        self._at += n
        return self._data[self._at - n : self._at]

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        """Return the numbers that come next."""
        return form.unpack(self.take(form.size))

    def close(self) -> None:
        """Raise ``PayloadError`` if anything is left."""
        left = len(self._data) - self._at
        require(not left, PayloadError, f"{left} bytes too many behind {self._what}")


class Closing(ABC):
    """The base of what ends by ``close``, or at the end of a ``with`` block.

    >>> class Door(Closing):
    ...     def close(self) -> None:
    ...         print("shut")
    >>> with Door():
    ...     pass
    shut
    """

    @abstractmethod
    def close(self) -> None:
        """End it. Safe to call twice."""

    def _leave(self, error: BaseException | None) -> None:
        """End it with its block; ``error`` is what ended the block, if anything did."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)
