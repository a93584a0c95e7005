"""The parameters that replicas exchange as one matrix of segments: by name, cut at a fixed width.

The order in which a framework made its parameters, and the buckets in which it reduces them, do not matter.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.codecs.matrices.factors import Cut, matrices_of
from thinwire.staging import to_host
from thinwire.types import InputError, require

WIDTH = 1 << 16  # values of a segment
CHUNK = 1 << 12  # values, of which a segment has a whole number
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)  # those that float32 holds


class FlatParameters:
    """Read the parameters, or their gradients, as [n, N] in fp32, and write them back.

    [n, N] is on the device of the parameters, of the first one where they are on several. A complex value is
    two values. What the last segment has too many are zeros.
    Errors: ``InputError`` where nothing is trained, or is of a dtype that float32 does not hold.

    >>> flat = FlatParameters({"b": torch.tensor([3.0]), "a": torch.tensor([[1.0, 2.0]])}, width=2)
    >>> flat.parameters()
    tensor([[1., 2.],
            [3., 0.]])
    """

    def __init__(self, parameters: Mapping[str, Tensor], width: int = WIDTH) -> None:
        require(len(parameters) > 0, InputError, "no parameter is trained here; there is nothing to exchange")
        for name, p in parameters.items():
            _check_dtype(name, p)
        self._parameters = {name: parameters[name] for name in sorted(parameters)}
        self._shapes = {name: real(p.detach()).shape for name, p in self._parameters.items()}
        self.device = next(iter(self._parameters.values())).device
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self._ordered, self._ends = list(self._parameters.values()), list(accumulate(self._sizes))
        self.numel = self._ends[-1]
        require(
            self.numel > 0, InputError, "what is trained here has no values; there is nothing to exchange"
        )
        rows = -(-self.numel // width)
        whole = CHUNK if width >= CHUNK else 1  # so that little is left over
        width = -(-self.numel // (rows * whole)) * whole
        self.shape = (rows, width)

    @property
    def digest(self) -> str:
        """Digest of names, shapes and cuts: replicas with another one cannot exchange."""
        return hashlib.blake2b(json.dumps([self.described, self.shape]).encode(), digest_size=16).hexdigest()

    @property
    def matrices(self) -> Cut:
        """Where each matrix of the parameters begins in all values, its rows and its width."""
        return matrices_of(self._shapes.values())

    @property
    def is_exact(self) -> bool:
        """Whether the parameters hold what is written into them to the bit."""
        return all(p.dtype in (torch.float32, torch.complex64) for p in self._parameters.values())

    @property
    def described(self) -> dict[str, str]:
        """Return shape and dtype of each parameter, as text."""
        return {name: f"{list(p.shape)} {p.dtype}" for name, p in self._parameters.items()}

    def parameters(self) -> Tensor:
        """Return the parameters' values [n, N]."""
        return self.flat({name: p.detach() for name, p in self._parameters.items()})

    def read(self, rows: slice) -> Tensor:
        """Return the parameters' values in some segments, [rows, N], in memory of their own."""
        out = torch.empty((rows.stop - rows.start, self.shape[1]), device=self.device)
        pieces = list(self._pieces(rows, out))
        copy_all([part for _, _, part in pieces], [p.reshape(-1)[span] for p, span, _ in pieces])
        out.view(-1)[max(0, self.numel - rows.start * self.shape[1]) :].zero_()
        return out

    def write(self, rows: slice, values: Tensor) -> None:
        """Write [rows, N] into the parameters that have values in these segments."""
        targets, parts = list[Tensor](), list[Tensor]()
        with torch.no_grad():
            for p, span, part in self._pieces(rows, values):
                row = p.reshape(-1)  # a view of what lies in one piece
                if p.is_contiguous():
                    targets.append(row[span])
                    parts.append(part)
                else:
                    copy_all([row[span]], [part])
                    p.copy_(row.view(p.shape))
            copy_all(targets, parts)

    def lost(self, rows: slice, values: Tensor) -> Tensor:
        """Return [rows, N] less what the parameters hold of it, in the memory of ``values``."""
        for p, _, part in self._pieces(rows, values):
            part.sub_(part.to(p.dtype))
        return values

    def gradients(self) -> Tensor:
        """Return the gradients [n, N]; zeros where a parameter has none."""
        return self.flat({name: p.grad for name, p in self._parameters.items() if p.grad is not None})

    def put_parameters(self, flat: Tensor) -> None:
        """Write [n, N] into the parameters."""
        with torch.no_grad():
            parts = self._parts(flat)
            copy_all([real(self._parameters[name]) for name, _ in parts], [part for _, part in parts])

    def put_gradients(self, flat: Tensor) -> None:
        """Write [n, N] into the gradients, also of parameters that have none yet."""
        targets, parts = list[Tensor](), self._parts(flat)
        for name, _ in parts:
            p = self._parameters[name]
            if p.grad is None or p.grad.is_conj():
                p.grad = torch.empty_like(p)
            targets.append(real(p.grad))
        copy_all(targets, [part for _, part in parts])

    def saved(self, state: Mapping[str, Tensor], prefix: str) -> Tensor:
        """Return what ``named`` made of [n, N]. Errors: ``InputError`` for a parameter that is not there."""
        lost = [name for name in self._parameters if prefix + name not in state]
        require(not lost, InputError, f"this state lacks {prefix}{', '.join(lost)}; load the whole of it")
        return self.flat(state, prefix)

    def flat(self, values: Mapping[str, Tensor], prefix: str = "") -> Tensor:
        """Return what ``values`` has for each parameter, under its name behind ``prefix``, as [n, N]."""
        out = torch.zeros(self.shape, device=self.device)
        targets, sources = list[Tensor](), list[Tensor]()
        for name, part in self._parts(out):
            value = values.get(prefix + name)
            if value is not None:
                value = real(value)
                if value.shape != part.shape:
                    text = f"{prefix}{name} has the shape {list(value.shape)}, not {list(part.shape)}"
                    raise InputError(f"{text}; give all replicas the same model")
                targets.append(part)
                sources.append(value)
        copy_all(targets, sources)
        return out

    def named(self, flat: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Return [n, N] by parameter, on the CPU: to be saved."""
        (here,) = to_host([flat]).tensors()
        return {prefix + name: part for name, part in self._parts(here)}

    def _pieces(self, rows: slice, values: Tensor) -> Iterator[tuple[Tensor, slice, Tensor]]:
        """Yield each parameter that has values in some segments: it, which of its values, and these."""
        row, width = values.view(-1), self.shape[1]
        first, last = rows.start * width, min(rows.stop * width, self.numel)
        for k in range(bisect_right(self._ends, first), len(self._ends)):
            start = self._ends[k] - self._sizes[k]
            low, high = max(first, start), min(last, self._ends[k])
            if start >= last:
                return
            if low >= high:  # an empty parameter
                continue
            span = slice(low - start, high - start)
            yield real(self._ordered[k].detach()), span, row[low - first : high - first]

    def _parts(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        parts = flat.view(-1)[: self.numel].split(self._sizes)
        return [(n, x.view(s)) for (n, s), x in zip(self._shapes.items(), parts, strict=True)]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target: a card starts a kernel for many of them, not one each."""
    pairs = list(zip(targets, sources, strict=True))
    beside = [(target, source) for target, source in pairs if target.device == source.device]
    if beside:
        torch._foreach_copy_([target for target, _ in beside], [source for _, source in beside])
    for target, source in pairs if len(beside) < len(pairs) else ():
        if target.device != source.device:
            target.copy_(source)


def real(x: Tensor) -> Tensor:
    """Return ``x``, where it is complex as its real and imaginary parts [..., 2]."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def all_finite(x: Tensor) -> Tensor:
    """Return whether all values are finite, as a tensor: whoever reads it waits for the device."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    return torch.stack(torch.aminmax(x)).isfinite().all()  # a NaN is both


def any_of(flags: Iterable[Tensor]) -> bool:
    """Return whether any flag is set: on the CPU the first one ends the search, a card is asked once."""
    there: list[Tensor] = []
    for flag in flags:
        if flag.device.type != "cpu":
            there.append(flag)
        elif flag:
            return True
    return bool(there) and bool(torch.stack([x.to(there[0].device) for x in there]).any())


def divided(total: Tensor, n: int) -> Tensor:
    """Divide in place, to the same bits on every device: a card multiplies for a divisor on the CPU."""
    return total.div_(torch.full((), n, dtype=total.dtype, device=total.device))


def _check_dtype(name: str, p: Tensor) -> None:
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    text = f"{name} is {str(p.dtype).removeprefix('torch.')}, and what replicas exchange is float32"
    require(p.dtype in DTYPES, InputError, f"{text}; train it as one of {names}, or freeze it")
