"""The ends of a stage boundary by themselves: order, closing, and values that cannot be encoded."""

import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from thinwire.channels.channel import Scheme
from thinwire.channels.references import TensorStore
from thinwire.codecs import Raw, Uniform
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
