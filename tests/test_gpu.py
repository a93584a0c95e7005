"""The same bits on every device: on a make-believe one here, and on a real GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from codec_examples import CODECS, SHAPES, tensor
from other_device import DEVICE, Elsewhere, Seen, There
from packets import INT8, MEMORIES
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.disk import DiskStore
from thinwire.channels.memory import Delta, Memory
from thinwire.channels.references import TensorStore
from thinwire.codecs import Cast, Entropy, Hadamard, RankOne, Sink, Uniform, roundtrip
from thinwire.types import Payload

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = [pytest.param(DEVICE, id="make-believe"), pytest.param(torch.device("cuda"), id="cuda", marks=cuda)]


@contextmanager
def on(device: torch.device) -> Iterator[Seen | None]:
    if device == DEVICE:
        with Elsewhere() as seen:
            yield seen
    else:
        yield None


@cuda
def test_a_tensor_of_over_2_gib_is_coded_on_a_card_as_its_parts_are() -> None:
    """The last of 17 equal matrices begins at byte 2**31."""
    one = tensor((1, 8192, 4096)).cuda()
    for codec in (Uniform(4), Hadamard(Uniform(4)), RankOne(1)):
        x = codec.decode(codec.encode(one.expand(17, -1, -1).contiguous()))
        assert all(torch.equal(x[i], x[0]) for i in (8, 15, 16)), codec
        del x


def is_on(x: Tensor, device: torch.device) -> bool:
    return x.device.type == device.type and isinstance(x, There) == (device == DEVICE)


def test_the_make_believe_device_refuses_what_a_gpu_would() -> None:
    with Elsewhere():
        x = torch.ones(3).to(DEVICE)
        assert torch.equal((x + 1).cpu(), torch.full((3,), 2.0))
        assert torch.equal((x + torch.tensor(1.0)).cpu(), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError, match="two devices"):
            x + torch.ones(3)
        with pytest.raises((RuntimeError, TypeError)):
            x.numpy()


@pytest.mark.parametrize("device", DEVICES)
def test_codecs_stay_on_their_device_and_decode_to_the_same_bits(device: torch.device) -> None:
    for codec in CODECS:
        if device == DEVICE and any(name in repr(codec) for name in ("TileAdaptive", "RandomK")):
            continue  # uses what the make-believe device cannot do (see other_device)
        for shape in [(2, 7, 33)] if device == DEVICE else SHAPES:
            with on(device):
                x = tensor(shape).to(device)
                payload, x_hat = roundtrip(codec, x)
                again = codec.decode(payload)
                assert all(is_on(t, device) for t in (*payload.parts, x_hat, again)), codec
                here = codec.decode(Payload(payload.spec, tuple(p.cpu() for p in payload.parts)))
                assert torch.equal(x_hat.cpu(), here) and torch.equal(again.cpu(), here), codec


def frames(device: torch.device) -> Iterator[tuple[Tensor, list[int]]]:
    """Frames of first visits, of revisits, and where a list may be an index, of both."""
    g = torch.Generator().manual_seed(0)
    mixed = [] if device == DEVICE else [[4, 7, 2], [8, 7, 0]]
    for ids in ([0, 1, 2], [3, 4, 5], [2, 5, 0], [1, 4, 3], *mixed):
        yield torch.randn((3, 4, 32), generator=g), ids


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory", [m for m in MEMORIES if m.mirrored], ids=repr)
def test_references_agree_across_devices(memory: Memory, device: torch.device) -> None:
    """A sender there and receivers on both sides: outputs and states equal to the last bit."""
    pytest.importorskip("zstandard")
    codec = Sink(Entropy(Uniform(bits=2)))
    sender, near, far = Sender(Scheme(codec, memory, codec, INT8)), Receiver(), Receiver()
    for x, ids in frames(device):
        with on(device):
            packet, x_hat = sender.encode(x.to(device), ids)
            data = wire.pack(packet)
            assert is_on(x_hat, device)
            there = far.decode(wire.unpack(data), device=device)
            assert is_on(there, device)
            assert torch.equal(there.cpu(), x_hat.cpu())
        assert torch.equal(near.decode(wire.unpack(data)), there.cpu())
    with on(device):
        states = [{k: v.cpu() for k, v in end.state_dict().items()} for end in (sender, near, far)]
    for name, value in states[0].items():
        assert all(torch.equal(value, other[name]) for other in states[1:]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["where it is", "host", "disk"])
def test_references_come_back_to_the_device(kind: str, device: torch.device) -> None:
    with on(device) as seen:
        store = DiskStore(memory=500) if kind == "disk" else TensorStore("cpu" if kind == "host" else None)
        sender, plain = Sender(Scheme(Uniform(bits=3), Delta(), INT8, INT8), store), Receiver()
        for x, ids in frames(device):
            x_there = x.to(device)
            if seen:
                seen.clear()
            packet, x_hat = sender.encode(x_there, ids)
            assert is_on(x_hat, device)
            if seen:  # all references of a message come together, and go together
                most = 0 if kind == "where it is" else 1
                assert seen.to_host <= most and seen.to_device <= most and len(seen.waits) <= most, seen
            assert torch.equal(plain.decode(wire.unpack(wire.pack(packet))), x_hat.cpu())
        store.close()


@cuda
def test_a_card_encodes_without_being_waited_for() -> None:
    for scheme in (
        Scheme(Cast(), Delta()),
        Scheme(Uniform(4), Delta(), Uniform(8), INT8),
        Scheme(Uniform(4)),
    ):
        sender = Sender(scheme)
        for ids in ([0, 1, 2], [0, 1, 2], [2, 3, 1]):
            x = torch.randn(3, 40, 64, device="cuda")
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                packet, _ = sender.encode(x, ids)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            wire.packed(packet)
