"""A cache of any model comes back near enough to go on from, in pieces or whole, and others are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import transformers
from travelling_caches import SEEN, ids, known, made

from thinwire import kv
from thinwire.kv.cache_stream import MAGIC
from thinwire.kv.component_file import components_from_bytes, components_to_bytes
from thinwire.types import InputError, PayloadError, ThinwireError

pytest.importorskip("zstandard")
FAMILIES = ["llama", "gpt2", "gemma2", "cohere"]  # halves turned, none, sliding windows, pairs turned


def errors(one: Any, two: Any) -> float:
    pairs = [
        (a, b)
        for x, y in zip(one.layers, two.layers, strict=True)
        for a, b in zip(tensors(x), tensors(y), strict=True)
    ]
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


def tensors(layer: Any) -> tuple[Any, Any]:
    return layer.keys.float(), layer.values.float()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_goes_on_from_a_packed_cache(family: str) -> None:
    own = known(family)
    fine, coarse = (kv.pack_cache(own.past, own.components, bits=bits, last=8) for bits in (10.0, 2.0))
    assert len(coarse) < len(fine) < sum(x.nbytes for layer in own.past.layers for x in tensors(layer))
    near, far = (kv.unpack_cache(data, own.components) for data in (fine, coarse))
    assert errors(own.past, near) < 0.2  # where the model does not mind
    assert near.get_seq_length() == own.past.get_seq_length() == SEEN
    assert [x.get_mask_sizes(3) for x in near.layers] == [x.get_mask_sizes(3) for x in own.past.layers]
    for got, held in zip(near.layers, own.past.layers, strict=True):
        assert all(
            torch.equal(a[:, :, -8:], b[:, :, -8:]) for a, b in zip(tensors(got), tensors(held), strict=True)
        )
    wanted = own.scores(own.past)
    close, distant = ((own.scores(past) - wanted).norm() / wanted.norm() for past in (near, far))
    assert close < 0.1 and close < distant


def test_what_comes_in_pieces_is_what_comes_whole() -> None:
    own = known("llama", dtype=torch.bfloat16)
    parts = list(kv.pack_parts(own.past, own.components, bits=3, last=5))
    data = b"".join(parts)
    assert data == kv.pack_cache(own.past, own.components, bits=3, last=5)
    reader, first = kv.CacheReader(own.components), []
    for part in parts[:2]:
        first += reader.feed(part)
    assert [a.layer for a in first] == list(own.components.bases[0].layers) and reader.head.seen == SEEN
    whole = kv.unpack_cache(data, own.components)
    pieces = kv.unpack_parts((data[i : i + 97] for i in range(0, len(data), 97)), own.components)
    assert isinstance(pieces, transformers.DynamicCache) and pieces.get_seq_length() == SEEN
    with pytest.raises(InputError, match="still to come"):
        kv.pack_cache(pieces, own.components)
    own.model.bfloat16()
    try:
        assert torch.equal(own.scores(pieces), own.scores(whole))
    finally:
        own.model.float()
    assert errors(pieces, whole) == 0


def test_a_cut_is_told_when_the_layer_is_missed() -> None:
    own = known("llama")
    data = kv.pack_cache(own.past, own.components)
    past = kv.unpack_parts(iter([data[:-5]]), own.components)
    with pytest.raises(PayloadError, match="it was cut"):
        own.scores(past)
    for n in (0, 5, 40, len(data) - 1):
        with pytest.raises(PayloadError):
            kv.unpack_cache(data[:n], own.components)


def test_layers_come_one_group_after_the_other() -> None:
    model, _ = made("gemma2")
    components = kv.calibrate(model, [ids(56, 1)], following=6, wide=64)
    assert [b.layers for b in components.bases] == [(0,), (1,), (2,), (3,)]
    past = known("gemma2").past
    reader = kv.CacheReader(components)
    came = [[a.layer for a in reader.feed(part)] for part in kv.pack_parts(past, components, last=2)]
    assert came == [[], [0], [1], [2], [3]] and reader.whole


def test_components_are_a_file(tmp_path: Path) -> None:
    own = known("gemma2")
    kv.save(own.components, tmp_path / "c.safetensors")
    again = kv.load(tmp_path / "c.safetensors")
    assert again.digest == own.components.digest and again.layers == own.components.layers
    assert kv.pack_cache(own.past, again, last=4) == kv.pack_cache(own.past, own.components, last=4)
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(tmp_path / "c.safetensors", "pt") as file:
        assert "0.vectors" in file.keys()  # noqa: SIM118 - it is no mapping
    data = components_to_bytes(own.components)
    for wrong in (
        b"",
        data[:100],
        data[:-3],
        data.replace(b"both", b"neck"),
        data.replace(b"halves", b"thirds"),
    ):
        with pytest.raises(PayloadError):
            components_from_bytes(wrong)
    length = int.from_bytes(data[:8], "little")
    text = re.sub(rb'"shape":\[\d+\]', b'"shape":[99999999999]', data[8 : 8 + length])
    huge = len(text).to_bytes(8, "little") + text + data[8 + length :]
    with pytest.raises(PayloadError, match="numbers in"):
        components_from_bytes(huge)
    (tmp_path / "other").write_bytes(b"no such file" * 9)
    with pytest.raises(PayloadError, match="other is no file of components"):
        kv.load(tmp_path / "other")


def refusals() -> dict[str, tuple[Any, str]]:
    own = known("llama")
    static = transformers.StaticCache(config=own.model.config, max_cache_len=64)
    two = transformers.DynamicCache()
    nan, double = known("llama").past, known("llama").past
    nan.layers[1].values[0, 0, 20, 0] = float("inf")
    for layer in double.layers:
        layer.keys, layer.values = layer.keys.double(), layer.values.double()
    for i in range(4):
        two.update(torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8), i)
    return {
        "static": (static, "past_key_values is a StaticCache; give a DynamicCache"),
        "tuple": ((), "past_key_values is a tuple"),
        "empty": (transformers.DynamicCache(), "holds no layers yet"),
        "two": (two, "holds 2 texts; pack each by itself"),
        "nan": (nan, "NaN or infinite"),
        "double": (double, "torch.float64, expected one of bfloat16, float16, float32"),
        "other": (known("gpt2").past, "keys of layer 0 are (4, 50, 8), expected (2, up to 50, 8)"),
    }


@pytest.mark.parametrize("name", ["static", "tuple", "empty", "two", "nan", "double", "other"])
def test_other_caches_are_refused_in_a_sentence(name: str) -> None:
    past, told = refusals()[name]
    with pytest.raises(InputError, match=re.escape(told)):
        kv.pack_cache(past, known("llama").components, last=8)


def test_another_model_s_components_are_refused() -> None:
    own, other = known("llama"), known("gpt2")
    data = kv.pack_cache(own.past, own.components)
    with pytest.raises(InputError, match=r"packed with components .* take those that it was packed with"):
        kv.unpack_cache(data, other.components)


@pytest.mark.parametrize(
    "field, value",
    [("seen", 1 << 40), ("seen", -1), ("kept", [1 << 40] * 4), ("kept", [1, 2, 3, 4]), ("dtype", "int4"),
     ("step", -1.0), ("step", "x"), ("first", 1 << 70), ("offset", 7.0), ("kept", None)],
)  # fmt: skip
def test_hostile_heads_are_refused_before_anything_is_allocated(field: str, value: Any) -> None:
    own = known("llama")
    data = kv.pack_cache(own.past, own.components)
    wrong = with_note(data, {field: value})
    with pytest.raises(PayloadError):
        kv.unpack_cache(wrong, own.components)


def test_a_reader_may_take_fewer_tokens_than_its_model() -> None:
    own = known("llama")
    data = kv.pack_cache(own.past, own.components)
    assert kv.unpack_cache(data, own.components, most=SEEN).get_seq_length() == SEEN
    for unpack in (kv.unpack_cache, lambda data, *rest, **most: kv.unpack_parts([data], *rest, **most)):
        with pytest.raises(PayloadError, match="of at most 49"):
            unpack(data, own.components, most=SEEN - 1)


def with_note(data: bytes, changed: dict[str, Any]) -> bytes:
    import zlib

    at = len(MAGIC)
    length = int.from_bytes(data[at : at + 4], "little")
    note = json.loads(data[at + 8 : at + 8 + length]) | changed
    text = json.dumps(note).encode()
    head = len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
    return MAGIC + head + text + data[at + 8 + length :]


def test_damaged_bytes_are_told() -> None:
    own = known("llama")
    data = kv.pack_cache(own.past, own.components, last=8)
    for at in range(0, len(data), max(1, len(data) // 40)):
        wrong = bytearray(data)
        wrong[at] ^= 16
        with pytest.raises(ThinwireError):
            kv.unpack_cache(wrong, own.components)
    with pytest.raises(PayloadError, match="bytes too many"):
        kv.unpack_cache(data + b"abc", own.components)


def test_too_short_texts_are_refused() -> None:
    model, _ = made("llama")
    with pytest.raises(InputError, match="a text of 20 tokens, expected more than 260"):
        kv.calibrate(model, [ids(20, 0)])
    with pytest.raises(InputError, match="no texts"):
        kv.calibrate(model, [])
