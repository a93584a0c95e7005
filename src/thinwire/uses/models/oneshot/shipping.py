"""One configuration of a trained network as what is sent: whole numbers, steps, one norm a layer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.files.checkpoint import read_checkpoint, write_checkpoint
from thinwire.types import ByteCursor, InputError, PayloadError, require
from thinwire.uses.models.oneshot.quantiser import EDGES, Classifier, LearnedSteps, Pair, SharedConv, codes_of
from thinwire.uses.models.oneshot.supernet import Configuration, Shape, Supernet
from thinwire.uses.models.streams import pack_codes, unpack_codes

EPSILON = 1e-5  # that batch norms add to a variance


@torch.no_grad()
def shipped(net: Supernet, configuration: Configuration) -> dict[str, Tensor]:
    """Return what a receiver needs for a configuration, with the norms' statistics as they are.

    For each layer i, in order, the first one included: ``i.codes`` int8 [outputs, inputs, kernel, kernel],
    ``i.steps`` float32 [2] of weights and inputs, ``i.bits`` uint8 [2], ``i.norm`` float32 [2, outputs], a
    scale and a shift. For the last layer ``head.codes``, ``head.steps``, ``head.bias``.
    """
    made = dict[str, Tensor]()
    for i, (layer, (w, a)) in enumerate(_layers(net, configuration)):
        norm, at = layer.norm, (layer.weights.index(w), layer.inputs.index(a))
        scale = norm.scale[at] / (norm.variance[at] + EPSILON).sqrt()
        made[f"{i}.codes"] = codes_of(layer.weight, layer.weights.of(w), w, signed=True).to(torch.int8)
        made[f"{i}.steps"] = torch.stack([layer.weights.of(w), layer.inputs.of(a)])
        made[f"{i}.bits"] = torch.tensor([w, a], dtype=torch.uint8)
        made[f"{i}.norm"] = torch.stack([scale, norm.shift[at] - norm.mean[at] * scale])
    head = net.head
    step = head.weights.of(EDGES)
    made["head.codes"] = codes_of(head.linear.weight, step, EDGES, signed=True).to(torch.int8)
    made["head.steps"] = torch.stack([step, head.inputs.of(EDGES)])
    made["head.bias"] = head.linear.bias.detach().clone()
    return made


def restored(tensors: Mapping[str, Tensor], shape: Shape) -> tuple[Supernet, Configuration]:
    """Return a network that holds one configuration, and that: ready to be used, not to be trained.

    Errors: ``PayloadError`` where a tensor is missing or does not fit the shape.
    """
    return _filled(Supernet(shape, seed=0), tensors)


@torch.no_grad()
def _filled(net: Supernet, tensors: Mapping[str, Tensor]) -> tuple[Supernet, Configuration]:
    net.eval()
    count = len(net.layers) + 1
    bits = [_fitting(tensors, f"{i}.bits", (2,)) for i in range(count)]
    pairs = [(int(w), int(a)) for w, a in bits]
    known = all(w in net.shape.widths and a in net.shape.widths for w, a in pairs[1:]) and pairs[0] == (
        EDGES,
        EDGES,
    )
    require(known, PayloadError, f"a configuration of {pairs}, which the network does not have")
    configuration = tuple(pairs[1:])
    for i, (layer, pair) in enumerate(_layers(net, configuration)):
        _fill(layer, pair, tensors, i)
    _fill_head(net.head, tensors)
    return net, configuration


def packed_nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of what is sent with the codes entropy-coded, without names and shapes."""
    return sum(len(_packed(x)) if name.endswith("codes") else x.nbytes for name, x in tensors.items())


def write_shipped(net: Supernet, configuration: Configuration, path: Path) -> int:
    """Write what ``shipped`` returns, codes entropy-coded, as a safetensors file; return its bytes."""
    tensors = {
        name: _packed(x) if name.endswith("codes") else x for name, x in shipped(net, configuration).items()
    }
    # Readers before ``repeats`` know no shape that has it.
    told = {name: value for name, value in asdict(net.shape).items() if (name, value) != ("repeats", 1)}
    tensors["shape"] = torch.tensor([*json.dumps(told).encode()], dtype=torch.uint8)
    write_checkpoint(path, tensors, {})
    return path.stat().st_size


def read_shipped(path: Path) -> tuple[Supernet, Configuration]:
    """Return what ``restored`` makes of a file of ``write_shipped``.

    Errors: ``InputError`` for another file, ``PayloadError`` for a damaged one.
    """
    tensors = read_checkpoint(path)
    told = f"{path} is no network of one configuration; give what thinwire.models.ship wrote"
    require("shape" in tensors, InputError, told)
    try:
        values = json.loads(bytes(tensors.pop("shape").tolist()))
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        net = Supernet(Shape(**given), seed=0)
    except (ValueError, TypeError, RuntimeError, InputError) as e:
        raise PayloadError(f"{path}: the shape of its network cannot be read: {e}") from e
    weights = [net.stem.weight, *(layer.weight for layer in net.layers)]
    like = {f"{i}.codes": x for i, x in enumerate(weights)} | {"head.codes": net.head.linear.weight}
    for name, weight in like.items():
        require(name in tensors, PayloadError, f"{path}: {name} is missing; ship it again")
        rows = weight.flatten(1)
        codes = unpack_codes(ByteCursor(bytes(tensors[name].numpy()), name), *rows.shape)
        tensors[name] = torch.from_numpy(codes.astype(np.int8)).reshape(weight.shape)
    return _filled(net, tensors)


def _packed(codes: Tensor) -> Tensor:
    data = pack_codes(codes.flatten(1).cpu().numpy().astype(np.int16))
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _layers(net: Supernet, configuration: Configuration) -> Iterator[tuple[SharedConv, Pair]]:
    yield from zip((net.stem, *net.layers), ((EDGES, EDGES), *configuration), strict=True)


def _fill(layer: SharedConv, pair: Pair, tensors: Mapping[str, Tensor], i: int) -> None:
    steps = _fitting(tensors, f"{i}.steps", (2,))
    layer.weight.copy_(_fitting(tensors, f"{i}.codes", tuple(layer.weight.shape)) * steps[0])
    _set_steps(layer.weights, pair[0], steps[0])
    _set_steps(layer.inputs, pair[1], steps[1])
    at = layer.weights.index(pair[0]), layer.inputs.index(pair[1])
    scale, shift = _fitting(tensors, f"{i}.norm", (2, len(layer.weight)))
    layer.norm.mean[at] = 0.0
    layer.norm.variance[at] = 1 - EPSILON
    layer.norm.scale[at], layer.norm.shift[at] = scale, shift


def _fill_head(head: Classifier, tensors: Mapping[str, Tensor]) -> None:
    steps = _fitting(tensors, "head.steps", (2,))
    head.linear.weight.copy_(_fitting(tensors, "head.codes", tuple(head.linear.weight.shape)) * steps[0])
    head.linear.bias.copy_(_fitting(tensors, "head.bias", tuple(head.linear.bias.shape)))
    _set_steps(head.weights, EDGES, steps[0])
    _set_steps(head.inputs, EDGES, steps[1])


def _set_steps(steps: LearnedSteps, bits: int, size: Tensor) -> None:
    require(bool(size.isfinite()) and float(size) > 0, PayloadError, f"a step of {float(size)}")
    i = steps.index(bits)
    steps.sizes[i], steps.begun[i] = size, True


def _fitting(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    found = tensors.get(name)
    told = "is missing" if found is None else f"has shape {list(found.shape)}, expected {list(shape)}"
    require(found is not None and tuple(found.shape) == shape, PayloadError, f"{name} {told}")
    return found  # type: ignore[return-value]
