"""Stores: where references live between two visits; in memory here, on disk in ``disk``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from thinwire import staging
from thinwire.codecs import Cast, Codec, Entropy, Raw, Uniform
from thinwire.types import InputError, Payload, TensorSpec

Parts = tuple[Tensor, ...]


class Store(Protocol):
    """A map from keys to the encoded parts of one reference.

    One that keeps them in the host's memory or on disk says so by an attribute ``on_host``: then those of a
    message cross from their device together.
    """

    def get(self, key: int) -> Parts | None:
        """Return the parts kept under ``key``, not to be written to, or ``None``."""
        ...

    def put(self, key: int, parts: Parts) -> None:
        """Keep a copy of ``parts`` under ``key``."""
        ...

    def prefetch(self, keys: Iterable[int]) -> None:
        """Expect ``get`` of these keys soon, in this order; those not held are no error. Returns at once."""
        ...

    def drop(self, keys: Iterable[int] | None = None) -> None:
        """Forget some keys, or all."""
        ...

    def keys(self) -> list[int]:
        """Return the keys held, in the order of their first ``put``."""
        ...

    def close(self) -> None:
        """Free what the store holds."""
        ...


class TensorStore:
    """Keep parts as tensors: where they are, or moved to ``device`` (``"cpu"`` for host memory)."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = device
        self.on_host = device is not None and torch.device(device).type == "cpu"
        self._parts: dict[int, Parts] = {}

    def get(self, key: int) -> Parts | None:
        return self._parts.get(key)

    def put(self, key: int, parts: Parts) -> None:
        if self._device is None:
            self._parts[key] = tuple([p.detach().clone() for p in parts])
        else:
            self._parts[key] = tuple([p.detach().to(self._device, copy=True) for p in parts])

    def prefetch(self, keys: Iterable[int]) -> None:
        pass

    def drop(self, keys: Iterable[int] | None = None) -> None:
        for k in self.keys() if keys is None else keys:
            self._parts.pop(k, None)

    def keys(self) -> list[int]:
        return list(self._parts)

    def close(self) -> None:
        self._parts.clear()


def check_holds(codec: Codec) -> None:
    """Raise ``InputError`` unless both ends *encode* the same bits with ``codec``, on whatever processor.

    Any codec decodes alike everywhere; one that adds up floats or takes logarithms may not encode alike.
    """
    inner = codec.inner if isinstance(codec, Entropy) else codec
    if not isinstance(inner, (Raw, Cast)) and not (isinstance(inner, Uniform) and inner.bits > 1):
        raise InputError(
            f"references cannot be held as {codec!r}; take Raw, Cast or Uniform of 2 bits or more"
        )


def splits(codec: Codec, spec: TensorSpec) -> bool:
    """Return whether each part of a payload is those of the tensor's rows, coded alone, one after another.

    >>> splits(Uniform(8), TensorSpec((1, 4, 32))), splits(Uniform(8, "channel"), TensorSpec((1, 4, 32)))
    (True, False)
    """
    if not isinstance(codec, Uniform):
        return isinstance(codec, (Raw, Cast))
    own_scales = codec.scale in ("token", "group") and codec.scale_dtype != "e5m3" and len(spec.shape) > 1
    return own_scales and codec.bits == 8 and codec.rounding == "nearest"


class References:
    """The states of one channel end: a store, and the codec that says how they are held (fp32, fp16, int8).

    Both ends hold the *decoded* form of what they keep, so a coarse codec costs accuracy but never agreement.
    """

    def __init__(self, codec: Codec | None = None, store: Store | None = None) -> None:
        self.codec: Codec = codec or Raw()
        self.store: Store = store if store is not None else TensorStore()
        self._specs: dict[int, TensorSpec] = {}

    def load(self, keys: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return the states of ``keys``, stacked, on ``device``; never write to them, nor to views of them.

        Errors: ``KeyError`` where there is none.
        """
        device = torch.device(device)
        if len(keys) == 1 and device.type == "cpu":
            parts = staging.brought(self._parts(keys[0]), device)
            return self.codec.decode(Payload(self._specs[keys[0]], tuple(parts)))
        specs = [self._specs[k] for k in keys]
        rows = [self._parts(k) for k in keys]
        if len(keys) > 1 and specs.count(specs[0]) == len(specs) and splits(self.codec, specs[0]):
            rows = [tuple(_in_one(column) for column in zip(*rows, strict=True))]
            specs = [_times(specs[0], len(keys))]
        there = iter(staging.brought([p for parts in rows for p in parts], device))
        states = [
            self.codec.decode(Payload(spec, tuple([next(there) for _ in parts])))
            for spec, parts in zip(specs, rows, strict=True)
        ]
        return torch.cat(states) if len(states) > 1 else states[0]

    def shape(self, key: int) -> tuple[int, ...] | None:
        """Return the shape of the state of ``key``, as one row; ``None`` where there is no state."""
        spec = self._specs.get(key)
        return None if spec is None else spec.shape

    def _parts(self, key: int) -> Parts:
        parts = self.store.get(key)
        if parts is None:
            raise KeyError(key)
        return parts

    def prefetch(self, keys: Iterable[int]) -> None:
        """Expect ``load`` of these keys soon; a store on disk begins to read them."""
        self.store.prefetch(keys)

    def save(self, keys: Sequence[int], states: Tensor) -> None:
        """Keep row i of ``states`` under key i."""
        self.put(keys, self.encode(states))

    def encode(self, states: Tensor) -> list[Payload]:
        """Return each row of ``states`` as it would be held, whatever the other rows are."""
        n, spec = states.shape[0], _times(TensorSpec.of(states), 1)
        if not splits(self.codec, spec):
            return [self.codec.encode(row) for row in states.split(1)]
        if n == 1:
            return [Payload(spec, self.codec.encode(states).parts)]
        columns = [p.reshape(n, p.numel() // n) for p in self.codec.encode(states).parts]
        return [Payload(spec, parts) for parts in zip(*columns, strict=True)]

    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        """Keep what ``encode`` returned."""
        rows = [payload.parts for payload in payloads]
        if getattr(self.store, "on_host", False):  # else each part would cross by itself
            there = iter(staging.brought([p for parts in rows for p in parts], "cpu"))
            rows = [tuple([next(there) for _ in parts]) for parts in rows]
        for key, payload, parts in zip(keys, payloads, rows, strict=True):
            self._specs[key] = payload.spec
            self.store.put(key, parts)

    def held(self) -> dict[int, Payload]:
        """Return what is held, not to be written to: for ``put``, should it be wanted again."""
        return {key: Payload(spec, self._parts(key)) for key, spec in self._specs.items()}

    def drop(self, keys: Iterable[int] | None = None) -> None:
        """Forget some keys, or all."""
        gone = list(self._specs) if keys is None else list(keys)
        self.store.drop(None if keys is None else gone)
        for k in gone:
            self._specs.pop(k, None)

    def states(self) -> Iterator[dict[str, Tensor]]:
        """Yield everything held as plain tensors, ready for safetensors: one reference at a time."""
        for key in self.store.keys():  # noqa: SIM118
            parts = self.store.get(key) or ()
            shape = torch.tensor(self._specs[key].shape, dtype=torch.int64, device="cpu")
            yield {f"{key}.shape": shape} | {f"{key}.{i}": part.clone() for i, part in enumerate(parts)}

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Keep references that ``states`` returned, one or many, beside what is held."""
        for key in sorted(int(name.removesuffix(".shape")) for name in state if name.endswith(".shape")):
            parts: list[Tensor] = []
            while (part := state.get(f"{key}.{len(parts)}")) is not None:
                parts.append(part)
            self._specs[key] = TensorSpec(tuple(state[f"{key}.shape"].tolist()))
            self.store.put(key, tuple(parts))

    def close(self) -> None:
        """Free what is held."""
        self.store.close()


def under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries of ``state`` whose names begin with ``prefix``, named without it."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _in_one(parts: Sequence[Tensor]) -> Tensor:
    """Return flat tensors as one: without a copy if they lie one behind the other, as of one message."""
    first, n = parts[0], parts[0].numel()
    place, start = first.untyped_storage().data_ptr(), first.storage_offset()
    behind = all(
        p.numel() == n and p.untyped_storage().data_ptr() == place and p.storage_offset() == start + i * n
        for i, p in enumerate(parts)
    )
    return first.as_strided((n * len(parts),), (1,)) if behind and n else torch.cat(list(parts))


def _times(spec: TensorSpec, rows: int) -> TensorSpec:
    return TensorSpec((rows, *spec.shape[1:]), spec.dtype)
