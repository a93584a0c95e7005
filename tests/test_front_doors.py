"""A use in Python: ``thinwire.scenes``, ``thinwire.models``, ``thinwire.federated``, as scripts have them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import thinwire
from thinwire import federated, models, scenes
from thinwire.files.checkpoint import read_checkpoint, write_checkpoint


def test_a_scene_is_packed_read_shown_and_written(tmp_path: Path) -> None:
    splats = thinwire.scenes.Splats.of(np.random.default_rng(0).normal(size=(400, 3)))
    data = scenes.pack(splats, nbytes=6_000)
    assert len(data) <= 6_000 and 0 < scenes.unpack(data, layers=1).count <= scenes.unpack(data).count == 400
    (tmp_path / "scene.tw").write_bytes(data)
    found = scenes.read(tmp_path / "scene.tw")
    scenes.write(tmp_path / "scene.ply", found)
    again = scenes.read(tmp_path / "scene.ply")
    np.testing.assert_allclose(again.positions, found.positions)
    assert "<canvas" in scenes.page(data, "a scene", "by nobody")
    with pytest.raises(thinwire.InputError, match="one of them"):
        scenes.pack(splats)
    with pytest.raises(AttributeError, match="no attribute 'Splat'"):
        scenes.Splat  # noqa: B018


def test_a_model_is_packed_and_a_next_version_like_it(tmp_path: Path) -> None:
    weights = {"w": torch.randn(64, 96, generator=torch.Generator().manual_seed(0))}
    write_checkpoint(tmp_path / "a.safetensors", weights, {})
    record = models.pack(tmp_path / "a.safetensors", tmp_path / "a.tw", bits=6)
    assert record.packed_nbytes == (tmp_path / "a.tw").stat().st_size < record.source_nbytes
    close = models.tensors(tmp_path / "a.tw")["w"]
    assert 0 < (close - weights["w"]).norm() < 0.05 * weights["w"].norm()
    assert models.unpack(tmp_path / "a.tw", tmp_path / "b.safetensors") == []
    assert torch.equal(read_checkpoint(tmp_path / "b.safetensors")["w"], close)
    models.pack(tmp_path / "a.safetensors", tmp_path / "c.tw", base=tmp_path / "a.tw")
    assert torch.equal(models.tensors(tmp_path / "c.tw")["w"], close)


def test_one_training_serves_any_budget(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    draw = torch.Generator().manual_seed(0)
    classes = torch.randint(2, (16,), generator=draw)
    images = torch.rand(16, 1, 8, 8, generator=draw) + 2.0 * classes[:, None, None, None]
    net = models.supernet([(images, classes)] * 4, 4, classes=2, channels=(4, 8))
    small, large = (tmp_path / name for name in ("small.safetensors", "large.safetensors"))
    sizes = [
        models.ship(net, [(images, classes)], out, nbytes=n) for out, n in ((small, 1100), (large, 1500))
    ]
    assert sizes == [small.stat().st_size, large.stat().st_size] and sizes[0] < sizes[1]
    again, widths = models.shipped(large)
    net.eval()
    torch.testing.assert_close(again(images, widths), net(images, widths), atol=1e-4, rtol=1e-4)
    assert sum(w for w, _ in widths) > sum(w for w, _ in models.shipped(small)[1])
    with pytest.raises(thinwire.InputError, match="the smallest widths cost"):
        models.ship(net, [(images, classes)], small, nbytes=10)
    with pytest.raises(thinwire.InputError, match="ended after 1 steps of 2"):
        models.supernet([(images, classes)], 2, classes=2, channels=(4,))
    write_checkpoint(tmp_path / "other.safetensors", {"w": torch.zeros(2)}, {})
    with pytest.raises(thinwire.InputError, match="no network of one configuration"):
        models.shipped(tmp_path / "other.safetensors")


def test_two_clients_train_what_a_server_serves(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    own = {"data": "digits", "split": "iid"}
    with ThreadPoolExecutor(3) as pool:
        port = Future[int]()
        options = {"data": "digits", "model": "logistic", "clients": 2, "rounds": 2, "port": 0}
        served = pool.submit(federated.serve, "fedavg", port.set_result, out=str(tmp_path), **options)
        served.add_done_callback(lambda done: port.done() or port.set_exception(done.exception()))
        at = f"127.0.0.1:{port.result(60)}"
        joined = [pool.submit(federated.join, at, part=f"{i}/2", **own) for i in range(2)]
        assert [done.result(120) for done in joined] == [2, 2]
        record = served.result(60)
    assert record.totals["rounds"] == 2 and record.accuracy.final is not None
    with pytest.raises(thinwire.InputError, match="rouds"):
        federated.compare("fedavg", rouds=3)
