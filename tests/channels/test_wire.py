"""The wire format: round trips, golden bytes, and the check of every field."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from codec_examples import CODECS
from each import each
from packets import INT8, SHAPE, every_kind, resigned, sequence, signed

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender, parse_scheme
from thinwire.channels.memory import Delta
from thinwire.channels.rows import checks
from thinwire.codecs import Cast, Raw, Uniform, parse_codec
from thinwire.types import Entry, InputError, Mode, Packet, Payload, PayloadError, Section, TensorSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "wire"


def same(a: Packet, b: Packet) -> bool:
    def head(p: Packet) -> tuple[object, ...]:
        return p.spec, p.memory, p.references, p.entries, [(s.mode, s.codec) for s in p.sections]

    parts = [[q for s in p.sections for q in s.payload.parts] for p in (a, b)]
    return (
        head(a) == head(b)
        and [s.payload.spec for s in a.sections] == [s.payload.spec for s in b.sections]
        and [(p.dtype, p.shape) for p in parts[0]] == [(p.dtype, p.shape) for p in parts[1]]
        and all(torch.equal(p.view(torch.uint8), q.view(torch.uint8)) for p, q in zip(*parts, strict=True))
    )


def test_every_kind_of_packet_reads_back() -> None:
    packets = every_kind()
    assert {s.mode for p in packets for s in p.sections} == set(Mode)
    assert {type(c).__name__ for c in CODECS} <= {
        s.codec.partition("(")[0] for p in packets for s in p.sections
    }
    for packet in packets:
        data = wire.pack(packet)
        again = wire.unpack(data)
        assert same(packet, again)
        assert wire.pack(again) == data
        assert wire.unpack(bytearray(data)).entries == wire.unpack(memoryview(data)).entries == packet.entries


@each("codec", CODECS)
def test_every_codec_in_a_delta_decodes_to_what_the_sender_says(codec: object) -> None:
    receiver = Receiver()
    for packet, x_hat in sequence(Delta(), codec):  # type: ignore[arg-type]
        assert torch.equal(receiver.decode(wire.unpack(wire.pack(packet))), x_hat)


@each("dtype", wire.DTYPES)
def test_every_dtype_goes_through(dtype: torch.dtype) -> None:
    x = torch.arange(12).reshape(3, 4).to(dtype)
    packet, _ = Sender().encode(x, [1, 2, 3])
    y = Receiver().decode(wire.unpack(wire.pack(packet)))
    assert y.dtype == dtype and torch.equal(y, x)


def test_an_unpacked_packet_does_not_hold_on_to_the_bytes() -> None:
    data = bytearray(wire.pack(every_kind()[0]))
    packet = wire.unpack(data)
    before = [p.clone() for s in packet.sections for p in s.payload.parts]
    data[:] = bytes(len(data))
    after = [p for s in packet.sections for p in s.payload.parts]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@each("path", sorted(GOLDEN.glob("*.json")))
def test_golden_bytes_are_written_and_read_as_they_were(path: Path) -> None:
    """Version 1 of the format, for good: a change of these bytes needs a new version number."""
    record = json.loads(path.read_text())
    assert record["version"] == wire.VERSION
    receiver, sender = Receiver(), Sender(parse_scheme(record["scheme"]))
    for stored in record["packets"]:
        x = torch.tensor(stored["x"]).reshape(SHAPE) / 64
        assert wire.pack(sender.encode(x, stored["ids"])[0]).hex() == stored["bytes"]
        packet = wire.unpack(bytes.fromhex(stored["bytes"]))
        assert [e.key for e in packet.entries] == stored["ids"]
        assert receiver.decode(packet).numpy().tobytes().hex() == stored["decoded"]


def test_there_are_golden_bytes_of_each_mode() -> None:
    modes = set()
    for path in GOLDEN.glob("*.json"):
        for p in json.loads(path.read_text())["packets"]:
            modes |= {s.mode for s in wire.unpack(bytes.fromhex(p["bytes"])).sections}
    assert modes == set(Mode)


# -- the check of every field: a packet of two entries of three float32, sent as they are -------------------


def body(
    head: tuple[int, ...] = (0, 2, 1, 0, 2),
    shape: tuple[int, ...] = (2, 3),
    texts: tuple[bytes, ...] = (b"NoMemory()", b"Raw()"),
    entries: tuple[tuple[int, ...], ...] = ((5, 0, 0, 0), (6, 0, 0, 0)),
    sections: tuple[tuple[int, bytes, tuple[tuple[int, int], ...]], ...] = ((0, b"Raw()", ((0, 6),)),),
    rest: bytes = bytes(24),
) -> bytes:
    """Write a packet field by field, independently of ``pack``."""
    out = struct.pack("<BBBBI", *head) + struct.pack(f"<{len(shape)}I", *shape)
    out += b"".join(struct.pack("<H", len(t)) + t for t in texts)
    out += b"".join(struct.pack("<QIIB", *e) for e in entries)
    for mode, codec, parts in sections:
        out += struct.pack("<BBH", mode, len(parts), len(codec)) + codec
        out += b"".join(struct.pack("<BI", *p) for p in parts)
    return out + rest


def test_a_packet_is_what_the_documentation_says() -> None:
    packet, _ = Sender().encode(torch.zeros(2, 3), [5, 6])
    assert signed(body()) == wire.pack(packet)


TWO = ((0, b"Raw()", ((0, 3),)), (0, b"Raw()", ((0, 3),)))
WRONG: dict[str, Callable[[], bytes]] = {
    "not a thinwire packet": lambda: b"TX" + signed(body())[2:],
    "wire version 2 is not 1": lambda: signed(body())[:2] + b"\2" + signed(body())[3:],
    "wire version": lambda: signed(body())[:3] + b"\1" + signed(body())[4:],  # a flag
    "it was damaged": lambda: signed(body())[:-1] + b"\1",
    "unknown dtype code 10": lambda: signed(body(head=(10, 2, 1, 0, 2))),
    "a packet of 0 dimensions": lambda: signed(body(head=(0, 0, 1, 0, 2), shape=())),
    "a packet of 9 dimensions": lambda: signed(body(head=(0, 9, 1, 0, 1), shape=(1,) * 9)),
    "a packet of 2 dimensions": lambda: signed(body(head=(0, 2, 1, 7, 2))),  # the byte kept free
    "a packet of 0 sections": lambda: signed(body(head=(0, 2, 0, 0, 2), sections=())),
    "a packet of 5 sections": lambda: signed(body(head=(0, 2, 5, 0, 2))),
    "3 entries for a tensor of shape": lambda: signed(body(head=(0, 2, 1, 0, 3))),
    "0 entries": lambda: signed(body(head=(0, 2, 1, 0, 0), shape=(0, 3), entries=())),
    "over the limit": lambda: signed(body(shape=(2, 1 << 30))),
    "is over the limit of": lambda: signed(body(head=(0, 3, 1, 0, 2), shape=(2, 0, (1 << 32) - 1))),
    "is not ASCII": lambda: signed(body(texts=(b"NoMemory\xff", b"Raw()"))),
    "too early": lambda: signed(body(texts=(b"NoMemory()",), entries=(), sections=(), rest=b"\xff\xff")),
    "do not match": lambda: signed(body(entries=((5, 0, 0, 0), (6, 0, 0, 1)))),
    "and sections of a packet": lambda: signed(body(head=(0, 2, 2, 0, 2), sections=TWO)),  # one is unused
    "not distinct": lambda: signed(body(entries=((5, 0, 0, 0), (5, 0, 0, 0)))),
    "that are not distinct": lambda: signed(body(entries=((5, 0, 0, 0), (1 << 63, 0, 0, 0)))),
    "a section of mode 3": lambda: signed(body(sections=((3, b"Raw()", ((0, 6),)),))),
    "with 17 parts": lambda: signed(body(sections=((0, b"Raw()", ((4, 0),) * 17),))),
    "a part of truth values": lambda: signed(body(sections=((0, b"Raw()", ((9, 6),)),))),
    "unknown dtype code 200": lambda: signed(body(sections=((0, b"Raw()", ((200, 6),)),))),
    "bytes too early": lambda: signed(body(sections=((0, b"Raw()", ((0, (1 << 32) - 1),)),))),
    "1 bytes too many": lambda: signed(body() + b"\0"),
}


@each("message", WRONG)
def test_a_wrong_field_is_refused_by_name(message: str) -> None:
    assert wire.unpack(signed(body())).spec == TensorSpec((2, 3))
    with pytest.raises(PayloadError, match=message.replace("(", r"\(")):
        wire.unpack(WRONG[message]())


def test_the_limit_is_the_callers() -> None:
    data = signed(body())
    assert wire.unpack(data, max_nbytes=24).spec.nbytes == 24
    with pytest.raises(PayloadError, match="a packet for 24 bytes is over the limit of 23"):
        wire.unpack(data, max_nbytes=23)


def test_a_part_of_the_wrong_length_for_its_codec_is_refused() -> None:
    packet = wire.unpack(signed(body(sections=((0, b"Raw()", ((0, 5),)),), rest=bytes(20))))
    with pytest.raises(PayloadError, match="expected"):
        Receiver().decode(packet)


# -- what the receiver refuses ----------------------------------------------------------------------------


def altered(packet: Packet, **changes: object) -> Packet:
    fields = {f: getattr(packet, f) for f in ("spec", "memory", "references", "entries", "sections")}
    return Packet(**{**fields, **changes})  # type: ignore[arg-type]


def first(codec: object = INT8) -> Packet:
    return sequence(Delta(), codec)[0][0]  # type: ignore[arg-type]


def test_values_to_remember_must_be_float32() -> None:
    spec = TensorSpec((1, 3), torch.float16)
    payload = Payload(spec, (torch.zeros(3, dtype=torch.float16),))
    packet = Packet(
        spec, "Delta()", "Raw()", (Entry(1, 1, 0, 0),), (Section(Mode.KEYFRAME, "Raw()", payload),)
    )
    with pytest.raises(PayloadError, match=r"are float32, not torch\.float16"):
        Receiver().decode(packet)


def test_a_mode_must_fit_the_memory() -> None:
    packet = first()
    for wrong in (altered(packet, memory="NoMemory()"), altered(packet, memory="ErrorFeedback()")):
        with pytest.raises(PayloadError, match="a section in mode KEYFRAME"):
            Receiver().decode(wrong)


def test_the_form_of_references_cannot_change_under_way() -> None:
    receiver, packets = Receiver(), sequence(Delta(), INT8)
    receiver.decode(packets[0][0])
    with pytest.raises(PayloadError, match="holds references as Raw"):
        receiver.decode(altered(packets[1][0], references="Raw()"))
    assert torch.equal(receiver.decode(packets[1][0]), packets[1][1])


def test_a_value_that_no_reference_can_hold_changes_nothing() -> None:
    """One of two sections cannot be held as int8: the other must not be kept either."""
    x, receiver = torch.zeros(2, 4, 16), Receiver()
    good = Sender(Scheme(Raw(), Delta(), Raw(), INT8))
    receiver.decode(good.encode(x[:1], [1])[0])
    before = receiver.state_dict()
    bad = Sender(Scheme(Raw(), Delta(), Raw(), Raw()))
    bad.encode(x[:1], [1])
    sent, _ = bad.encode(x, [1, 2])
    assert [s.mode for s in sent.sections] == [Mode.KEYFRAME, Mode.DELTA]
    sent.sections[0].payload.parts[0].fill_(torch.inf)  # which no sender of ours would let pass
    entries = (sent.entries[0], replace(sent.entries[1], check=checks(torch.full((1, 4, 16), torch.inf))[0]))
    packet = altered(sent, entries=entries, references=repr(INT8))
    with pytest.raises(PayloadError, match="NaN or infinite"):
        receiver.decode(packet)
    after = receiver.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


def test_ids_that_no_packet_can_carry_are_refused_at_the_sender() -> None:
    for ids in ([-1], [1 << 63]):
        with pytest.raises(InputError, match="sample ids are numbers from 0"):
            Sender().encode(torch.zeros(1, 3), ids)
    with pytest.raises(InputError, match="0 rows need"):
        Sender().encode(torch.zeros(0, 3), [])


def test_damage_without_a_new_check_sum_never_gets_past_it() -> None:
    data = wire.pack(first(Cast("bfloat16")))
    for at in range(8, len(data)):
        hurt = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(PayloadError, match="damaged"):
            wire.unpack(hurt)
        assert resigned(data) == data


@each(
    "text",
    [
        "Uniform(bits=4",
        "Uniform(bits=4)(bits=4)",
        "Uniform(bits=2+2)",
        "Uniform(4, 'group', 32, 'nearest', 0, 'bfloat16', 1.0, 7)",
        "Uniform(bits=4, bits=4)",
        "Uniform(4, bits=4)",
        "Uniform(**Raw())",
        "Uniform(*Raw())",
        "Uniform(bits=99999999999999999999)",
        "Uniform(bits=1e999)",
        "Uniform(bits=1if 1else 2)",
        "Uniform(scale='\\d')",
        "Cast('fl' 'ot')",
        "Sink(first=TopK(ratio=0.5))",
        "Sink(Raw(), Uniform(group=0.5))",
        "Hadamard(Raw(), block=1073741824)",
        "Hadamard(Raw(), block=2.0)",
        "Entropy(Raw(), level='high')",
        "TopK(ratio=-0.5)",
        "TopK(0.5, values=7)",
        "().__class__",
        "__import__('os')",
        "lambda: 1",
        "4",
        "'Raw()'",
        "-Raw()",
        "Delta()",
        "",
        "\0",
        "Raw()\n",
        "(" * 400,
        "Entropy(" * 60 + "Raw()" + ")" * 60,
        "A" * 600,
    ],
)
def test_a_hostile_spec_is_refused(text: str) -> None:
    with pytest.raises(PayloadError):
        parse_codec(text)


def test_a_spec_may_nest_as_deep_as_any_recipe_needs() -> None:
    text = "Sink(ChannelMean(Hadamard(Entropy(Uniform(bits=3)))), first=Cast(), positions=2)"
    assert parse_codec(text) == parse_codec(repr(parse_codec(text)))
    assert Uniform(bits=-0 + 4) == parse_codec("Uniform(bits=4)")
