"""Prefixes are found by their tokens, loaded where that is sooner, and LMCache's chunks find their place."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from travelling_caches import SEEN, ids, known

from thinwire import kv
from thinwire.codecs.caches.cache_rows import CacheRows
from thinwire.kv import lmcache_serde
from thinwire.types import InputError, MissingExtra, PayloadError

pytest.importorskip("zstandard")
TIMES = st.floats(1e-6, 1e2)


def test_the_longest_stored_prefix_is_found(tmp_path: Path) -> None:
    own, short, other = known("llama"), known("llama", 30), known("gpt2")
    text = [*ids(SEEN, 5).tolist(), 7, 8, 9]
    store = kv.PrefixStore(str(tmp_path), own.components)
    assert store.longest(text) is None
    (tmp_path / "notes.txt").write_text("not a cache")
    first = store.put(text[:30], short.past)
    whole = store.put(text[:SEEN], own.past, bits=4)
    assert store.longest(text) == whole and store.longest(text[:40]) == first
    assert (
        store.longest([1, *text]) is None
        and kv.PrefixStore(str(tmp_path), other.components).longest(text) is None
    )
    assert (
        store.get(whole).get_seq_length() == SEEN and whole.nbytes == (tmp_path / whole.name).stat().st_size
    )
    store.delete(whole)
    assert store.longest(text) == first
    with pytest.raises(InputError, match="a cache of 50 tokens for a text of 53"):
        store.put(text, own.past)
    with pytest.raises(FileNotFoundError):
        store.get(whole)


@given(TIMES, TIMES, TIMES, st.integers(1, 1 << 20), st.integers(1, 1 << 30))
def test_loading_is_chosen_exactly_where_it_is_sooner(
    each: float, delay: float, rate: float, n: int, nbytes: int
) -> None:
    times = kv.Recomputing(each, each / 1e4)

    def verdict(rate: float, held: int = 0) -> kv.LoadVerdict:
        link = {"rate": rate * 1e6, "delay": delay, "unpacking": 1e8}
        return kv.load_or_recompute(nbytes, n, **link, computing=times, held=held)

    found = verdict(rate)
    assert found.load == (found.loading < found.computing) or abs(found.loading - found.computing) < 1e-5
    assert found.load <= verdict(2 * rate).load  # a faster link never speaks against loading
    assert verdict(rate, held=n).computing == 0 and not verdict(rate, held=n).load


@given(st.floats(1e-6, 1e-2), st.floats(0, 1e-6))
def test_times_fit_the_runs_that_they_are_from(each: float, pair: float) -> None:
    true = kv.Recomputing(each, pair)
    found = kv.Recomputing.measured([(n, true.seconds(n)) for n in (256, 1024, 3000)])
    assert found.seconds(2048) == pytest.approx(true.seconds(2048), rel=1e-6)
    assert kv.Recomputing.measured([(100, true.seconds(100))]).seconds(100) == pytest.approx(
        true.seconds(100)
    )


def test_wrong_measurements_are_refused() -> None:
    for runs, told in (
        ([], "no runs"),
        ([(0, 1.0)], "1.0 seconds for 0 tokens"),
        ([(5, -1.0)], "-1.0 seconds"),
    ):
        with pytest.raises(InputError, match=told):
            kv.Recomputing.measured(runs)
    with pytest.raises(InputError, match="rate=0 bytes/s"):
        kv.load_or_recompute(1, 1, rate=0, delay=0, unpacking=1, computing=kv.Recomputing(1))


def chunk(past: Any, start: int, stop: int) -> torch.Tensor:
    """Return tokens of a cache as LMCache has them."""
    both = [
        [x[0, :, start:stop].transpose(0, 1).flatten(1) for x in (layer.keys, layer.values)]
        for layer in past.layers
    ]
    return torch.stack([torch.stack(own) for own in zip(*both, strict=True)])


def test_chunks_of_lmcache_find_their_place_and_come_back() -> None:
    own = known("llama", 48)
    rows = CacheRows(own.components.step(8.0), last=0)
    packer = lmcache_serde.ChunkSerializer(own.components, rows)
    unpacker = lmcache_serde.ChunkDeserializer(own.components)
    for begin in (0, 16, 32):
        data = chunk(own.past, begin, begin + 16)
        layout = SimpleNamespace(shapes=[data.shape], dtypes=[data.dtype])
        room = torch.zeros(packer.estimate_serialized_size(layout), dtype=torch.uint8)
        n = packer.serialize(SimpleNamespace(tensor=data), SimpleNamespace(tensor=room), None)
        assert int.from_bytes(bytes(room[4:8].tolist()), "little") == begin
        back = torch.zeros_like(data)
        unpacker.deserialize(SimpleNamespace(tensor=room[:n]), SimpleNamespace(tensor=back), None)
        assert float((back - data).norm() / data.norm()) < 0.1
        with pytest.raises(InputError, match="there is room for 10"):
            packer.serialize(SimpleNamespace(tensor=data), SimpleNamespace(tensor=room[:10]), None)
        with pytest.raises(PayloadError, match="a packed chunk"):
            unpacker.deserialize(SimpleNamespace(tensor=room[:9]), SimpleNamespace(tensor=back), None)
    with pytest.raises(InputError, match="a chunk of shape"):
        lmcache_serde.chunk_to_bytes(data[:, :2], own.components, rows)


def test_what_lmcache_calls_is_what_is_there() -> None:
    """By the names that its wheel has, which ``read_lmcache.py`` noted."""
    noted = json.loads(Path(__file__).with_name("lmcache.json").read_text("utf-8"))["signatures"]
    both = {"Serializer": lmcache_serde.ChunkSerializer, "Deserializer": lmcache_serde.ChunkDeserializer}
    for owner, own in both.items():
        methods = {
            name.partition(".")[2]: names for name, names in noted.items() if name.startswith(f"{owner}.")
        }
        assert methods
        for method, names in methods.items():
            assert list(inspect.signature(getattr(own, method)).parameters)[1:] == names
    assert noted[".register_serde_factory"] == ["name", "factory"]
    assert "max_workers" in noted["AsyncSerdeProcessor.__init__"]


def test_lmcache_is_asked_for_by_name() -> None:
    try:
        import lmcache  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtra, match="install lmcache"):
            lmcache_serde.register(known("llama").components)
