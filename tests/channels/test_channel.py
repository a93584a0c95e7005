"""Sender and receiver: agreement, modes, gaps, resets, checkpoints, with every memory and kind of store."""

import subprocess
import sys

import pytest
import torch
from each import each
from packets import INT8, MEMORIES

from thinwire import codecs
from thinwire.channels import memory, wire
from thinwire.channels.channel import Receiver, Scheme, Sender, parse_scheme
from thinwire.channels.disk import DiskStore
from thinwire.channels.memory import Delta, ErrorFeedback, FirstVisit, NoMemory, RunningMean, SecondOrderDelta
from thinwire.channels.references import TensorStore
from thinwire.codecs import (
    Cast,
    ChannelMean,
    ChunkTopK,
    DeadZone,
    Entropy,
    FixedPoint,
    Hadamard,
    InTurn,
    RandomK,
    Raw,
    Sink,
    TileAdaptive,
    TopK,
    Uniform,
    is_finite,
)
from thinwire.types import DesyncError, InputError, Mode, PayloadError, TensorSpec


def walk(steps=6, rows=3, shape=(5, 32), seed=0):
    """Frames of a random walk by sample: ids differ from step to step, so first visits and revisits mix."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, *shape, generator=g)
    for _ in range(steps):
        ids = torch.randperm(8, generator=g)[:rows]
        x[ids] += 0.1 * torch.randn(rows, *shape, generator=g)
        yield x[ids].clone(), ids.tolist()


def over_the_wire(packet):
    return wire.unpack(wire.pack(packet))


def test_every_memory_is_tested():
    assert {type(m) for m in MEMORIES} == set(memory.REGISTRY.values())


@each("held_as", [Raw(), Cast("float16"), INT8])
@each("mem", MEMORIES)
def test_the_receiver_outputs_what_the_sender_says(mem, held_as):
    sender = Sender(Scheme(Uniform(bits=4, group=16), mem, Uniform(bits=4, group=16), held_as))
    receiver = Receiver()
    for x, ids in walk():
        packet, x_hat = sender.encode(x, ids)
        assert torch.equal(receiver.decode(over_the_wire(packet), expect=TensorSpec.of(x)), x_hat)
        assert [e.key for e in packet.entries] == ids


@each("shape", [(3, 5, 32), (3, 32), (3,)])
@each("mem", MEMORIES)
def test_a_memory_knows_the_shape_of_its_state(mem, shape):
    x = torch.randn(shape)
    state = mem.advance(x, None, x)
    found = state if state is None or mem.shared else state[0]
    assert mem.state_shape(shape) == (None if found is None else (1, *found.shape))


def test_a_first_encode_under_error_feedback_imports_nothing():
    """Shapes were once taken from arithmetic on meta tensors, for which torch imports 800 modules."""
    code = (
        "import sys, torch\n"
        "from thinwire.channels.channel import Scheme, Sender\n"
        "from thinwire.channels.memory import ErrorFeedback\n"
        "x = torch.ones(2, 32)\n"
        "Sender(Scheme()).encode(x, [0, 1])\n"
        "before = set(sys.modules)\n"
        "Sender(Scheme(memory=ErrorFeedback())).encode(x, [0, 1])\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr


@each("mem", MEMORIES)
def test_specs_read_back(mem):
    scheme = Scheme(Uniform(bits=3), mem, Cast("bfloat16"), INT8)
    assert memory.parse_memory(repr(mem)) == mem
    assert parse_scheme(repr(scheme)) == scheme


def test_a_memory_alone_in_a_scheme_reads_back_as_a_memory():
    assert parse_scheme(repr(Scheme(memory=Delta()))) == Scheme(memory=Delta())
    with pytest.raises(PayloadError, match="is no codec"):
        parse_scheme("Scheme(Delta())")


def test_raw_through_a_delta_memory_loses_only_rounding():
    sender, receiver = Sender(Scheme(memory=Delta())), Receiver()
    for x, ids in walk():
        packet, _ = sender.encode(x, ids)
        assert torch.allclose(receiver.decode(packet), x, atol=1e-6)


def test_a_delta_by_sample_beats_direct_coding_and_a_mean_beats_the_step_before():
    """The two claims the library rests on: a sample moves little, and samples differ much."""

    def error(scheme):
        sender, total, norm = Sender(scheme), 0.0, 0.0
        for i, (x, ids) in enumerate(walk(steps=40)):
            x = x + 3.0
            _, x_hat = sender.encode(x, ids)
            if i > 15:
                total, norm = total + (x - x_hat).square().sum(), norm + x.square().sum()
        return (total / norm).sqrt().item()

    code = Uniform(bits=3, group=16)
    by_sample, by_step = error(Scheme(code, Delta())), error(Scheme(code, Delta("step")))
    direct, mean = error(Scheme(code)), error(Scheme(code, RunningMean()))
    assert by_sample < direct / 3
    assert mean < by_step < direct


def test_error_feedback_sends_everything_in_the_end():
    sender = Sender(Scheme(Uniform(bits=2, group=16), ErrorFeedback()))
    total, sent = torch.zeros(1, 4, 32), torch.zeros(1, 4, 32)
    for i in range(30):
        x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(i))
        total, sent = total + x, sent + sender.encode(x, [7])[1]
    state = sender.state_dict()["7.0"].reshape(1, 4, 32)
    assert torch.allclose(total, sent + state, atol=1e-4)


def test_error_feedback_with_decay_forgets_as_it_says():
    sender, dropped = Sender(Scheme(Uniform(bits=2, group=16), ErrorFeedback(decay=0.75))), 0.0
    for i in range(5):
        x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(i))
        wanted = x + 0.75 * dropped
        dropped = wanted - sender.encode(x, [7])[1]
        assert torch.allclose(sender.state_dict()["7.0"].reshape(1, 4, 32), dropped, atol=1e-5)


@each("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_that_would_grow_is_refused(decay):
    with pytest.raises(InputError, match="decay"):
        ErrorFeedback(decay=decay)


@each("value", [float("inf"), -float("inf"), float("nan")])
@each("at", [0, 63, 999])
@each(
    "codec",
    [ChunkTopK(0.02, 64), TopK(0.01, Uniform(bits=8)), InTurn(10, 3), RandomK(0.1), DeadZone(), Raw()],
)
def test_what_is_not_finite_leaves_every_residual_as_it_was(codec, at, value):
    """One value of one row, which a sparse codec may not even send; the other rows are refused with it."""
    sender, again = (Sender(Scheme(codec, ErrorFeedback(decay=0.9))) for _ in range(2))
    frames = [torch.randn(3, 1000) for _ in range(3)]
    for end in (sender, again):
        end.encode(frames[0], [1, 2, 3])
    before = sender.state_dict()
    bad = torch.randn(3, 1000)
    bad[1, at] = value
    for keys in ([1, 2, 3], [1, 2, 4], [4, 2, 1]):
        with pytest.raises(InputError, match="a NaN or infinite value cannot be"):
            sender.encode(bad, keys)
    after = sender.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    for x in frames[1:]:
        assert torch.equal(sender.encode(x, [1, 2, 4])[1], again.encode(x, [1, 2, 4])[1])


def test_first_visits_and_revisits_share_a_frame():
    sender = Sender(Scheme(Uniform(bits=2, group=16), Delta(), Cast("float16")))
    x = torch.randn(2, 4, 32)
    sender.encode(x, [1, 2])
    packet, _ = sender.encode(torch.randn(3, 4, 32), [2, 3, 1])
    modes = [packet.sections[e.section].mode for e in packet.entries]
    assert modes == [Mode.DELTA, Mode.KEYFRAME, Mode.DELTA]
    assert [e.version for e in packet.entries] == [2, 1, 2]


def test_evaluation_touches_no_reference():
    sender, receiver = Sender(Scheme(INT8, Delta())), Receiver()
    x = torch.randn(2, 4, 32)
    receiver.decode(sender.encode(x, [0, 1])[0])
    before = sender.state_dict(), receiver.state_dict()
    packet, x_hat = sender.encode(x + 9, [0, 1], mode=Mode.DIRECT)
    assert torch.equal(receiver.decode(over_the_wire(packet)), x + 9)
    assert torch.equal(x_hat, x + 9)
    for a, b in zip(before, (sender.state_dict(), receiver.state_dict()), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def pair():
    sender, receiver = Sender(Scheme(INT8, Delta())), Receiver()
    receiver.decode(sender.encode(torch.randn(1, 4, 32), [5])[0])
    return sender, receiver


def test_a_lost_packet_is_noticed_and_a_keyframe_mends_it(pair):
    sender, receiver = pair
    sender.encode(torch.randn(1, 4, 32), [5])  # lost
    with pytest.raises(DesyncError, match="sample 5: expected version 2, got 3") as e:
        receiver.decode(sender.encode(torch.randn(1, 4, 32), [5])[0])
    assert e.value.keys == (5,)
    sender.reset([5])
    packet, x_hat = sender.encode(torch.randn(1, 4, 32), [5])
    assert packet.sections[0].mode is Mode.KEYFRAME
    assert torch.equal(receiver.decode(packet), x_hat)
    packet, x_hat = sender.encode(torch.randn(1, 4, 32), [5])
    assert torch.equal(receiver.decode(packet), x_hat)


def test_a_repeated_packet_is_noticed_keyframe_or_delta():
    sender, receiver = Sender(Scheme(INT8, Delta())), Receiver()
    for _ in range(2):
        packet, _ = sender.encode(torch.randn(1, 4, 32), [5])
        receiver.decode(packet)
        with pytest.raises(DesyncError):
            receiver.decode(packet)


def test_drift_is_noticed_and_nothing_changes(pair):
    sender, receiver = pair
    state = receiver.state_dict()
    state["5.0"] = state["5.0"] + 1
    receiver.load_state_dict(state)
    with pytest.raises(DesyncError, match="differs from the sender's"):
        receiver.decode(sender.encode(torch.randn(1, 4, 32), [5])[0])
    after = receiver.state_dict()
    assert all(torch.equal(state[k], after[k]) for k in state)


def test_a_delta_without_a_reference_is_a_desync(pair):
    sender, _ = pair
    with pytest.raises(DesyncError, match="expected version 1, got 2"):
        Receiver().decode(sender.encode(torch.randn(1, 4, 32), [5])[0])


@each("mem", MEMORIES)
def test_a_checkpoint_of_both_ends_goes_on_as_if_nothing_happened(mem):
    scheme = Scheme(Uniform(bits=3, group=16), mem, INT8, INT8)
    sender, receiver, frames = Sender(scheme), Receiver(), list(walk(steps=8))
    for x, ids in frames[:4]:
        receiver.decode(sender.encode(x, ids)[0])
    sender2, receiver2 = Sender(scheme), Receiver()
    sender2.load_state_dict(sender.state_dict())
    receiver2.load_state_dict(receiver.state_dict())
    for x, ids in frames[4:]:
        packet, x_hat = sender.encode(x, ids)
        packet2, _ = sender2.encode(x, ids)
        assert wire.pack(packet) == wire.pack(packet2)
        assert torch.equal(receiver2.decode(packet2), x_hat)


def test_a_store_on_disk_holds_what_one_in_memory_holds(tmp_path):
    scheme = Scheme(Uniform(bits=3, group=16), Delta(), INT8, INT8)
    disk = DiskStore(tmp_path, memory=1000)
    a, b = Sender(scheme, TensorStore("cpu")), Sender(scheme, disk)
    for x, ids in walk(steps=10):
        b.prefetch(ids)
        assert torch.equal(a.encode(x, ids)[1], b.encode(x, ids)[1])
    assert sorted(disk.keys()) == sorted(range(8))
    disk.drop([3])
    assert disk.get(3) is None
    disk.close()


def test_wrong_arguments():
    with pytest.raises(InputError, match="as many distinct sample ids"):
        Sender().encode(torch.zeros(2, 3), [1, 1])
    with pytest.raises(InputError, match="slots"):
        Sender(Scheme(memory=Delta("step"))).encode(torch.zeros(2, 3), [1, 2], [0])
    with pytest.raises(InputError, match="sample or step"):
        Delta("token")


@each("mem", [Delta(), SecondOrderDelta(0.25), RunningMean(), ErrorFeedback()])
@each("codec", [Uniform(bits=4, group=16), Raw()])
def test_a_sample_of_another_shape_is_refused_until_its_key_is_reset(mem, codec):
    sender, receiver = Sender(Scheme(codec, mem, codec, INT8)), Receiver()
    receiver.decode(sender.encode(torch.randn(2, 5, 4), [1, 2])[0])
    before = sender.state_dict()
    others = [(2, 5, 8), (2, 1, 8)] if mem.shared else [(2, 1, 4), (2, 6, 4), (2, 5, 1), (2, 4)]
    for shape in others:
        with pytest.raises(InputError, match=r"sample 1 has the shape .*; pad samples"):
            sender.encode(torch.randn(shape), [1, 2])
    assert all(torch.equal(value, before[name]) for name, value in sender.state_dict().items())
    sender.reset([1, 2])
    for _ in range(2):
        packet, x_hat = sender.encode(torch.randn(2, 6, 8), [1, 2])
        assert torch.equal(receiver.decode(over_the_wire(packet)), x_hat)


@each("mode", [None, Mode.KEYFRAME])
@each("mem", [m for m in MEMORIES if m.mirrored])
def test_a_first_visit_in_bfloat16_is_exact_in_its_own_two_bytes(mem, mode):
    sender, receiver = Sender(Scheme(Uniform(bits=4), mem)), Receiver()
    x = torch.randn(2, 4, 32).bfloat16()
    packet, x_hat = sender.encode(x, [1, 2], mode=mode)
    assert packet.nbytes == x.nbytes
    assert torch.equal(receiver.decode(over_the_wire(packet)), x.float()) and torch.equal(x_hat, x.float())
    packet, x_hat = sender.encode(x, [1, 2])
    assert torch.equal(receiver.decode(over_the_wire(packet)), x_hat)


def test_a_visit_that_keeps_no_values_fits_any_shape():
    sender = Sender(Scheme(Uniform(bits=4), FirstVisit()))
    assert [sender.encode(torch.randn(1, n, 8), [1])[1].shape[1] for n in (3, 5)] == [3, 5]


@each("value", [float("inf"), -float("inf"), float("nan")])
@each("codec", [Raw(), Cast("bfloat16"), RandomK(1.0), Uniform(bits=4)])
@each("mem", [Delta(), SecondOrderDelta(0.25), RunningMean(), ErrorFeedback()])
def test_what_is_not_finite_spoils_no_reference(mem, codec, value):
    sender, receiver = Sender(Scheme(codec, mem, codec)), Receiver()
    good, bad = torch.randn(1, 2, 4), torch.full((1, 2, 4), value)
    for _ in range(2):  # at the first visit, and later
        with pytest.raises(InputError, match="a NaN or infinite value cannot be"):
            sender.encode(bad, [1])
        packet, x_hat = sender.encode(good, [1])
        assert torch.equal(receiver.decode(over_the_wire(packet)), x_hat)
        assert x_hat.isfinite().all()


@each("mem", [FirstVisit(), NoMemory()])
def test_what_is_not_finite_passes_where_it_spoils_nothing(mem):
    sender, receiver = Sender(Scheme(memory=mem)), Receiver()
    for value in (float("inf"), 2.0, 2.0):
        x = torch.full((1, 2, 4), value)
        assert torch.equal(receiver.decode(over_the_wire(sender.encode(x, [1])[0])), x)


def test_codecs_that_look_at_every_value_need_no_second_look():
    coded = Entropy(DeadZone())
    assert all(
        map(is_finite, [coded, Sink(ChannelMean(coded)), Hadamard(Uniform()), FixedPoint(), TileAdaptive()])
    )
    assert not any(
        map(is_finite, [Raw(), Cast(), Hadamard(Raw()), TopK(0.1, coded), Sink(coded, first=Raw())])
    )


@each("x", [torch.tensor(1.0), torch.ones(1, dtype=torch.complex64)])
def test_a_tensor_that_no_packet_describes_is_one_sentence(x):
    with pytest.raises(InputError, match="cannot be sent"):
        Sender().encode(x, [1])


def test_a_mode_asked_for_is_taken_or_refused():
    sender = Sender(Scheme(INT8, Delta()))
    for options in ({"keyframe": Uniform(bits=2)}, {"codec": Uniform(bits=2)}):
        packet, _ = sender.encode(torch.randn(1, 4, 32), [1], mode=Mode.KEYFRAME, **options)
        assert [(s.mode, s.codec) for s in packet.sections] == [(Mode.KEYFRAME, "Uniform(bits=2)")]
    for mode in (Mode.DELTA, 2):
        with pytest.raises(InputError, match=r"mode=.* take Mode\.DIRECT, Mode\.KEYFRAME or None"):
            sender.encode(torch.randn(1, 4, 32), [1], mode=mode)


def test_a_packet_of_another_shape_is_refused_before_it_is_decoded():
    packet, _ = Sender().encode(torch.zeros(2, 3), [1, 2])
    with pytest.raises(PayloadError, match="expected"):
        Receiver().decode(packet, expect=TensorSpec((2, 4)))


def test_a_codec_can_change_from_message_to_message():
    sender, receiver = Sender(Scheme(INT8, Delta())), Receiver()
    for i, codec in enumerate([None, Uniform(bits=2, group=16), None, Raw(), Cast("bfloat16")]):
        packet, x_hat = sender.encode(torch.full((1, 2, 16), float(i)), [0], codec=codec)
        assert torch.equal(receiver.decode(over_the_wire(packet)), x_hat)


def test_the_mean_does_not_depend_on_the_order_of_summation():
    x = torch.randn(64, 7, 48) * 100
    assert torch.equal(memory.exact_mean(x), memory.exact_mean(x[torch.randperm(64)].transpose(0, 1)))


def test_the_mean_stays_within_what_its_sums_can_hold():
    x = torch.tensor([[1e16, -1e16, 1e-5, float("inf"), float("nan"), 3.0]]).repeat(3, 1)
    limit = 2.0**50 / 4
    assert memory.exact_mean(x).tolist() == [limit, -limit, 0, limit, 0, 3]


def test_registries_do_not_clash():
    assert not set(codecs.REGISTRY) & set(memory.REGISTRY)


def test_the_default_device_changes_nothing():
    sender, receiver = Sender(Scheme(DeadZone(), Delta(), Raw())), Receiver(DiskStore())
    for x, ids in walk():
        with torch.device("meta"):
            packet, x_hat = sender.encode(x, ids)
            decoded = receiver.decode(over_the_wire(packet))
            parts = [sender.state_dict(), receiver.state_dict()]
        assert torch.equal(decoded, x_hat)
        assert {t.device.type for part in parts for t in part.values()} == {"cpu"}
    with torch.device("meta"):
        packet, _ = sender.encode(torch.ones(1, 0, device="cpu"), [99], mode=Mode.DIRECT)
        assert over_the_wire(packet).sections[0].payload.parts[0].device.type == "cpu"


@each("mem", [m for m in MEMORIES if m != NoMemory()])
@each("turned", [False, True])
def test_what_is_done_to_the_output_changes_neither_packet_nor_reference(mem, turned):
    sender, receiver = Sender(Scheme(memory=mem)), Receiver()
    for step in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        x = x.t() if turned else x[:4].contiguous()
        packet, x_hat = sender.encode(x, [0, 1, 2, 3])
        sent = x_hat.clone()
        x_hat.zero_()
        decoded = receiver.decode(over_the_wire(packet))
        assert torch.equal(decoded, sent)
        decoded.zero_()


@each("mem", MEMORIES)
@each("shape", [(2, 0), (2, 3, 0), (2, 0, 3)])
def test_every_memory_takes_samples_of_nothing(mem, shape):
    sender, receiver = Sender(Scheme(memory=mem)), Receiver()
    for _ in range(2):
        packet, _ = sender.encode(torch.ones(shape), [1, 2])
        assert receiver.decode(over_the_wire(packet)).shape == shape
