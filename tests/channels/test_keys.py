"""The keys of a channel: what may be one, and what is held for it."""

import pytest
import torch
from each import each
from packets import INT8

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.memory import Delta
from thinwire.codecs import Raw, Uniform
from thinwire.types import DesyncError, InputError, Mode, PayloadError


@each(
    ("keys", "message"),
    [
        ([1.2, 1.7], r"sample ids are whole numbers, got \[1\.2, 1\.7\]"),
        (["a", "b"], "sample ids are whole numbers"),
        (torch.tensor([1.0, 2.0]), "sample ids are whole numbers"),
        (None, "sample ids are whole numbers"),
        (torch.tensor([5, 5]), r"as many distinct sample ids, got \[5, 5\]"),
        ([1, -2], "from 0 to"),
        ([1, 1 << 63], "from 0 to"),
    ],
)
def test_keys_that_are_no_sample_ids_are_one_sentence(keys, message):
    with pytest.raises(InputError, match=message):
        Sender().encode(torch.zeros(2, 3), keys)


def test_slots_and_keys_to_forget_may_be_a_tensor():
    sender, receiver, keys = Sender(Scheme(Uniform(), Delta(key="step"))), Receiver(), torch.arange(3)
    for _ in range(2):
        packet, _ = sender.encode(torch.randn(3, 8), keys, slots=keys)
        receiver.decode(packet, slots=keys)
    assert [s.mode for s in packet.sections] == [Mode.DELTA] and len(sender.state_dict()["versions"]) == 3
    sender.prefetch(keys)
    sender.reset(keys[:1])
    receiver.reset(keys[1:])
    packet, _ = sender.encode(torch.randn(3, 8), keys, slots=keys)
    assert [e.section for e in packet.entries] == [0, 1, 1]
    with pytest.raises(DesyncError, match="sample 1: expected version 1"):
        receiver.decode(packet, slots=keys)


def test_a_state_is_not_stretched_to_fit_a_packet():
    """A column under a row: of a few bytes each, and larger than any memory together."""
    receiver, n = Receiver(), 1 << 20
    first, _ = Sender(Scheme(Raw(), Delta())).encode(torch.ones(1, 1, n), keys=[5])
    receiver.decode(first)
    tall = Sender(Scheme(Raw(), Delta()))
    for _ in range(2):
        second, _ = tall.encode(torch.ones(1, n, 1), keys=[5])
    with pytest.raises(PayloadError, match="does not fit the state held for its keys"):
        receiver.decode(second)
    narrow, wide = (Sender(Scheme(Raw(), Delta())) for _ in range(2))
    receiver = Receiver()
    receiver.decode(narrow.encode(torch.ones(1, 1, 4), keys=[5])[0])
    wide.encode(torch.ones(1, 3, 4), keys=[5])
    with pytest.raises(PayloadError, match="does not fit the state held for its keys"):
        receiver.decode(wide.encode(torch.ones(1, 3, 4), keys=[5])[0])


def test_keys_may_be_a_tensor():
    sender, receiver = Sender(Scheme(INT8, Delta())), Receiver()
    for mode in (Mode.KEYFRAME, Mode.DELTA):
        packet, x_hat = sender.encode(torch.randn(2, 4, 32), torch.tensor([5, 6]))
        assert packet.sections[0].mode is mode
        assert torch.equal(receiver.decode(wire.unpack(wire.pack(packet))), x_hat)
