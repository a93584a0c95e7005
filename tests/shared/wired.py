"""A store in memory that loses its connections, and raises errors of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from fsspec.implementations.memory import MemoryFileSystem

OPERATIONS = ("info", "cat_file", "pipe_file", "rm_file", "ls", "makedirs")


class Gone(Exception):
    """What a store's own library raises: no ``OSError``."""


class Wired(MemoryFileSystem):
    """Connects once, when it is made, and takes the options of that alone, as SFTP's does.

    ``outage`` is the server's, by operation; what ``broken`` says of a connection stays so.
    """

    protocol = ("wired", "memory")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    outage: ClassVar[dict[str, Exception]] = {}
    made: ClassVar[list[Wired]] = []

    def __init__(self) -> None:
        self.broken: Exception | None = None
        self.reach("connect")
        super().__init__()
        self.made.append(self)

    def reach(self, operation: str) -> None:
        for error in (self.broken, self.outage.get(operation)):
            if error is not None:
                raise error

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        found: str = super()._strip_protocol(path.removeprefix("wired://"))
        return found


def _reached(operation: str) -> Callable[..., Any]:
    real = getattr(MemoryFileSystem, operation)

    def reaching(self: Wired, *args: Any, **options: Any) -> Any:
        self.reach(operation)
        return real(self, *args, **options)

    return reaching


for name in OPERATIONS:
    setattr(Wired, name, _reached(name))


def thousand() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(1000.0)}
