"""The parameters that replicas exchange as one matrix of segments: by name, cut at a fixed width.

The order in which a framework made its parameters, and the buckets in which it reduces them, do not matter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.types import InputError, require

WIDTH = 1 << 16  # values of a segment
CHUNK = 1 << 12  # values, of which a segment has a whole number


class Table:
    """Read the parameters, or their gradients, as [n, N] in fp32, and write them back.

    What the last segment has too many are zeros. Errors: ``InputError`` where nothing is trained.

    >>> table = Table({"b": torch.tensor([3.0]), "a": torch.tensor([[1.0, 2.0]])}, width=2)
    >>> table.parameters()
    tensor([[1., 2.],
            [3., 0.]])
    """

    def __init__(self, parameters: Mapping[str, Tensor], width: int = WIDTH) -> None:
        require(len(parameters) > 0, InputError, "no parameter is trained here; there is nothing to exchange")
        self._parameters = {name: parameters[name] for name in sorted(parameters)}
        self.numel = sum(p.numel() for p in self._parameters.values())
        rows = -(-self.numel // width)
        whole = CHUNK if width >= CHUNK else 1  # so that little is left over
        width = -(-self.numel // (rows * whole)) * whole
        self.shape = (rows, width)

    @property
    def digest(self) -> str:
        """Digest of names, shapes and cuts: replicas with another one cannot exchange."""
        rows = [[name, list(p.shape), str(p.dtype)] for name, p in self._parameters.items()]
        return hashlib.blake2b(json.dumps([rows, self.shape]).encode(), digest_size=16).hexdigest()

    def parameters(self) -> Tensor:
        """Return the parameters' values [n, N]."""
        return self.flat({name: p.detach() for name, p in self._parameters.items()})

    def gradients(self) -> Tensor:
        """Return the gradients [n, N]; zeros where a parameter has none."""
        return self.flat({name: p.grad for name, p in self._parameters.items() if p.grad is not None})

    def put_parameters(self, flat: Tensor) -> None:
        """Write [n, N] into the parameters."""
        with torch.no_grad():
            for name, part in self._parts(flat):
                self._parameters[name].copy_(part)

    def put_gradients(self, flat: Tensor) -> None:
        """Write [n, N] into the gradients, also of parameters that have none yet."""
        for name, part in self._parts(flat):
            p = self._parameters[name]
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(part)

    def flat(self, values: Mapping[str, Tensor], prefix: str = "") -> Tensor:
        """Return what ``values`` has for each parameter, under its name behind ``prefix``, as [n, N]."""
        out = torch.zeros(self.shape)
        for name, part in self._parts(out):
            value = values.get(prefix + name)
            if value is not None:
                part.copy_(value)
        return out

    def named(self, flat: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Return views of [n, N] by parameter."""
        return {prefix + name: part for name, part in self._parts(flat)}

    def _parts(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        sizes = [p.numel() for p in self._parameters.values()]
        parts = flat.view(-1)[: self.numel].split(sizes)
        return [(n, x.view(p.shape)) for (n, p), x in zip(self._parameters.items(), parts, strict=True)]
