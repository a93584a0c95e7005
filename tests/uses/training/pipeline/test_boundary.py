"""The ends of a stage boundary by themselves: order, closing, and values that cannot be encoded."""

import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from each import each
from other_device import DEVICE, Elsewhere

from thinwire.channels.channel import Scheme
from thinwire.channels.memory import Delta
from thinwire.channels.references import TensorStore
from thinwire.codecs import Cast, Raw, Uniform
from thinwire.links import Mailbox, loopback_pair
from thinwire.types import ThinwireError
from thinwire.uses.training.pipeline.boundary import Incoming, NotFinite, Outgoing, StageTally
from thinwire.uses.training.run.training_rank import _diverging


class Held(Raw):
    """A codec that waits before each tensor until it may go on."""

    go = threading.Event()

    def encode(self, x):
        self.go.wait(60)
        return super().encode(x)


class Posting:
    """A neighbour that keeps what is posted to it."""

    def __init__(self):
        self.mailbox, self.posted = self, []

    def send(self, tag, body, label="control"):
        self.posted.append(tag)
        return Future()

    def fail(self, error):
        self.error = error

    def wire_bytes(self, tag, nbytes):
        return nbytes


@pytest.mark.parametrize("held", [False, True])
def test_closing_posts_what_waits_to_be_encoded_unless_it_cannot(held):
    Held.go.clear()
    out, peer = Outgoing("forward", 0, Scheme(Held()), TensorStore(), StageTally(), own_lane=True), Posting()
    for mb in range(3):
        out.send(peer, mb, torch.ones(2, 4), [0, 1], training=True)
    assert not peer.posted
    if not held:
        threading.Timer(0.1, Held.go.set).start()
    start = time.perf_counter()
    out.close()
    assert time.perf_counter() - start < 30
    assert len(peer.posted) == (0 if held else 3)
    Held.go.set()


@pytest.mark.parametrize(
    ("way", "where"), [("forward", "activations of stage 1 to 2"), ("backward", "gradients of stage 1 to 0")]
)
def test_values_that_cannot_be_encoded_are_placed(way, where):
    out = Outgoing(way, 1, Scheme(Uniform(4)), TensorStore(), StageTally(), own_lane=False)
    with pytest.raises(NotFinite, match=f"{where}: a NaN or infinite value"):
        out.send(Posting(), 0, torch.full((2, 4), torch.nan), [0, 1], training=True)
        out.settle()
    with pytest.raises(ThinwireError, match=r"^step 7: no number, or lower --lr$") as e, _diverging(7):
        raise NotFinite("no number")
    assert e.value.exit_code == 3  # as where the loss or the norm is the first to run away
    out.close()


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_who_waits_for_an_answer_to_what_could_not_be_encoded_hears_at_once(way):
    """The encoding beside the compute fails while the stage waits for what the other makes of it."""
    ours, theirs = (Mailbox(end) for end in loopback_pair())
    peer = SimpleNamespace(
        mailbox=ours,
        wire_bytes=lambda tag, n: n,
        get=lambda tag, deadline, what: ours.get(tag, deadline, what),
    )
    back = {"forward": "backward", "backward": "forward"}[way]
    out = Outgoing(way, 1, Scheme(Uniform(4)), TensorStore(), StageTally(), own_lane=True)
    answers = Incoming(back, 1, TensorStore(), StageTally(), 600.0, own_lane=True)
    answers.expect(0, torch.empty(2, 4), peer)
    threading.Timer(
        0.2, out.send, (peer, 0, torch.full((2, 4), torch.nan), [0, 1]), {"training": True}
    ).start()
    start = time.perf_counter()
    with pytest.raises(NotFinite, match=r"of stage 1 to .: a NaN or infinite value"):
        answers.land(0, more=False)
    assert time.perf_counter() - start < 60
    for end in (out, answers, ours, theirs):
        end.close()


def test_a_lane_that_waits_does_not_keep_the_interpreter():
    code = (
        "import threading\n"
        "from thinwire.uses.training.pipeline.boundary import lane\n"
        "a, b = lane('left open', own=True), lane('closed', own=True)\n"
        "running, queued = b.submit(threading.Event().wait, 600), b.submit(print)\n"
        "a.submit(threading.Event().wait, 600)\n"
        "b.shutdown(cancel_futures=True)\n"
        "raise SystemExit(0 if queued.cancelled() else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


class Across:
    """Neighbours whose messages are at the other end at once; each end takes this one for its peer."""

    def __init__(self):
        self.mailbox, self.bodies = self, {}

    def send(self, tag, body, label="control"):
        self.bodies[tag], done = bytes(body), Future()
        done.set_result(None)
        return done

    def get(self, tag, deadline, what):
        return self.bodies.pop(tag)

    def wire_bytes(self, tag, nbytes):
        return nbytes

    def fail(self, error):
        self.error = error


def ends(scheme):
    out = Outgoing("forward", 0, scheme, TensorStore(), StageTally(), own_lane=False)
    return out, Incoming("forward", 1, TensorStore(), StageTally(), 60.0, own_lane=False), Across()


VISITS = ([0, 1, 2], [0, 1, 2], [2, 3, 1])  # first ones, revisits, and both in one message
SCHEMES = [
    Scheme(),
    Scheme(Cast()),
    Scheme(Cast(), Delta(), Cast("bfloat16"), Cast("float16")),
    Scheme(Uniform(8), Delta(), Uniform(8), Uniform(8)),
]


@each("scheme", SCHEMES)
def test_a_message_of_a_device_crosses_in_one_copy_each_way_and_is_waited_for_once(scheme):
    out, into, across = ends(scheme)
    with Elsewhere() as seen:
        for step, ids in enumerate(VISITS):
            x, buffer = torch.randn(3, 4, 32).to(DEVICE), torch.zeros(3, 4, 32).to(DEVICE)
            seen.clear()
            out.send(across, step, x, ids, training=True)
            assert (seen.to_host, seen.to_device, len(seen.waits)) == (1, 0, 1), seen
            seen.clear()
            into.expect(step, buffer, across)
            assert into.land(step, more=False) == ids
            assert seen.to_device == 1 and seen.to_host <= 1 and len(seen.waits) == seen.to_host, seen
            assert torch.allclose(buffer.cpu(), x.cpu(), atol=0.02)


@each("there, here", [(DEVICE, torch.device("cpu")), (torch.device("cpu"), DEVICE)])
def test_ends_on_different_devices_agree_to_the_bit(there, here):
    scheme = Scheme(Uniform(3), Delta(), Uniform(8), Uniform(8))
    (out, into, across), (plain_out, plain_into, plain) = ends(scheme), ends(scheme)
    with Elsewhere():
        for step, ids in enumerate(VISITS):
            x, same, buffer = torch.randn(3, 4, 32), torch.zeros(3, 4, 32), torch.zeros(3, 4, 32).to(here)
            for one_out, one_into, peer, given, room in (
                (out, into, across, x.to(there), buffer),
                (plain_out, plain_into, plain, x, same),
            ):
                one_out.send(peer, step, given, ids, training=True)
                one_into.expect(step, room, peer)
                one_into.land(step, more=False)
            assert torch.equal(buffer.cpu(), same)


def test_what_only_the_devices_values_tell_is_refused_when_it_leaves_and_the_channel_goes_on():
    scheme = Scheme(Cast(), Delta())
    out, into, across = ends(scheme)
    with Elsewhere():
        good, bad = torch.randn(2, 4).to(DEVICE), torch.full((2, 4), torch.nan).to(DEVICE)
        for step, x in enumerate((good, bad, good)):
            if x is bad:
                with pytest.raises(NotFinite, match="activations of stage 0 to 1: a NaN or infinite value"):
                    out.send(across, step, x, [0, 1], training=True)
                    out.settle()
                assert not across.bodies
                continue
            out.send(across, step, x, [0, 1], training=True)
            buffer = torch.zeros(2, 4).to(DEVICE)
            into.expect(step, buffer, across)
            into.land(step, more=False)
        assert torch.equal(buffer.cpu(), good.cpu())  # a keyframe: the reference held what was not sent
