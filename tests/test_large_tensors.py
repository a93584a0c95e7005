"""Tensors of over 2**31 bytes in codecs and replicas, without their memory; states are in ``state``."""

from __future__ import annotations

import pytest
import torch
from codec_examples import CODECS

from thinwire.codecs import Codec, Rows, TopK
from thinwire.codecs.sparse import MAX_NUMEL
from thinwire.types import InputError, TensorSpec
from thinwire.uses.training.replicas.flat_parameters import WIDTH, FlatParameters

SIDE = 1 << 14
THERE = torch.device("meta")


def test_a_codec_takes_for_over_2_gib_what_it_takes_for_their_parts() -> None:
    for codec in CODECS:
        one, three = (codec.nbytes(TensorSpec((n, SIDE, SIDE))) for n in (1, 3))
        assert 0 < three <= 3 * one < 1.003 * three, codec


def test_a_codec_that_counts_positions_says_how_many_values_it_takes() -> None:
    tried = 0
    for codec in [*CODECS, Rows(TopK(0.1))]:
        if _is_sparse(codec):
            tried += 1
            with pytest.raises(InputError, match=rf"takes up to {MAX_NUMEL} values, got \d+; cut them"):
                codec.encode(torch.empty((3, SIDE, SIDE), device=THERE))
    assert tried > 9


def _is_sparse(codec: Codec) -> bool:
    return any(kind in repr(codec) for kind in ("TopK", "RandomK", "HardThreshold", "Rows", "InTurn"))


def test_replicas_lay_out_over_2_to_the_31_values_one_behind_another() -> None:
    sizes = {"a": (2**31 + 3,), "b": (SIDE, SIDE), "c": (1,)}
    model = {name: torch.nn.Parameter(torch.empty(size, device=THERE)) for name, size in sizes.items()}
    flat = FlatParameters(model)
    rows, width = flat.shape
    assert flat.numel == 2**31 + 4 + SIDE**2 and width <= WIDTH
    assert flat.numel <= rows * width < flat.numel + rows * width // 1000
    flat.put_gradients(flat.flat({name: p.detach() for name, p in model.items()}))
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.values())
    starts = [part.storage_offset() for _, part in flat._parts(torch.empty(flat.shape, device=THERE))]
    assert starts == [0, 2**31 + 3, 2**31 + 3 + SIDE**2]
