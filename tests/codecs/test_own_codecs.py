"""Codecs of somebody's own: subclasses, changed classes, and parts that no packet holds."""

from dataclasses import dataclass

import pytest
import torch
from each import each

from thinwire import codecs
from thinwire.channels import memory, wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.memory import Delta, NoMemory
from thinwire.codecs import Entropy, Raw, Uniform, is_finite, is_fixed_rate, parse_codec
from thinwire.types import InputError, Payload, TensorSpec


@dataclass(frozen=True, repr=False)
class Halved(Uniform):
    """What it inherits codes other values than it does itself."""

    def encode(self, x):
        return super().encode(x / 2)

    def decode(self, payload):
        return super().decode(payload) * 2


@dataclass(frozen=True, repr=False)
class Finer(Uniform):
    """Another way to make codes, which everything inherited goes by."""

    def quantise(self, x):
        return super().quantise(x.round())


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(codecs, "REGISTRY", codecs.REGISTRY | {"Halved": Halved, "Finer": Finer})
    return codecs.REGISTRY


@pytest.mark.parametrize("codec", [Halved(), Finer(), Entropy(Halved()), Entropy(Finer())], ids=repr)
@pytest.mark.parametrize("mem", [NoMemory(), Delta()], ids=repr)
def test_a_subclass_is_sent_by_its_own_passes(registered, codec, mem):
    sender, receiver = Sender(Scheme(codec, mem)), Receiver()
    for _ in range(3):
        x = 100 * torch.randn(2, 64)
        packet, x_hat = sender.encode(x, keys=[0, 1])
        assert torch.equal(receiver.decode(wire.unpack(wire.pack(packet))), x_hat)
        assert (x_hat - x).abs().max() < 0.2 * x.abs().max()


def test_what_a_subclass_changes_is_not_vouched_for_by_what_it_inherits():
    assert not is_finite(Halved()) and not is_fixed_rate(Halved())
    assert is_finite(Finer()) and is_fixed_rate(Finer()) and is_finite(Entropy(Finer()))


@pytest.mark.parametrize(
    ("registry", "parse"), [(codecs.REGISTRY, parse_codec), (memory.REGISTRY, memory.parse_memory)]
)
def test_a_class_that_is_registered_anew_is_the_one_that_counts(monkeypatch, registry, parse):
    """As where a notebook's cell is run again."""
    base = Uniform if registry is codecs.REGISTRY else Delta

    def made():
        return dataclass(frozen=True, repr=False)(type("Mine", (base,), {}))

    for kind in (made(), made()):
        monkeypatch.setitem(registry, "Mine", kind)
        assert type(parse("Mine()")) is kind


@dataclass(frozen=True)
class Odd:
    """Parts as they may be in a process, but not in a packet."""

    parts: tuple

    def __repr__(self):
        return "Odd()"

    def encode(self, x):
        return Payload(TensorSpec.of(x), self.parts)

    def decode(self, payload):
        return torch.zeros(payload.spec.shape)

    def nbytes(self, spec):
        return 0


@each(
    ("parts", "words"),
    [
        ((torch.ones(3, dtype=torch.bool),), "a part of torch.bool and 1 dimensions"),
        ((torch.ones(3, 2),), "a part of torch.float32 and 2 dimensions"),
        ((torch.ones(1),) * 17, "17 parts"),
    ],
)
def test_parts_that_no_packet_holds_are_refused_with_the_codec_s_name(parts, words):
    packet, _ = Sender(Scheme(Raw())).encode(torch.ones(1, 3), keys=[0], codec=Odd(parts))
    with pytest.raises(
        InputError, match=rf"^Odd\(\) made {words}; a packet holds at most 16 flat tensors of float32"
    ):
        wire.pack(packet)
