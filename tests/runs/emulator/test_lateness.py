"""What the emulator counts: segments, lateness by packet and by second, failures in words."""

from __future__ import annotations

import struct

import pytest

from thinwire.links.shape import SEGMENT
from thinwire.runs.emulator.packets import HEADER, cut, destination, on_the_wire
from thinwire.runs.emulator.timing_error import LatenessMeter, limit
from thinwire.runs.ranks.supervise import RankFailure


def tun_packet(payload: int, segment: int = 0, to: bytes = bytes((10, 77, 0, 2))) -> bytes:
    """Build what a device hands over: virtio header, IPv4, TCP with time stamps, payload."""
    offload = bytes((1, 1 if segment else 0, 0, 0)) + segment.to_bytes(2, "little") + bytes(4)
    ip = bytes((0x45,)) + bytes(11) + bytes((10, 77, 0, 1)) + to
    tcp = bytes(12) + bytes((0x80,)) + bytes(19)
    return offload + ip + tcp + bytes(payload)


def test_an_offloaded_packet_counts_as_the_segments_that_a_card_would_send() -> None:
    assert len(tun_packet(0)) == HEADER + 52
    assert on_the_wire(tun_packet(100)) == (152, 1)
    assert on_the_wire(tun_packet(1448, SEGMENT)) == (1500, 1)
    assert on_the_wire(tun_packet(1449, SEGMENT)) == (1449 + 2 * 52, 2)
    assert on_the_wire(tun_packet(44 * 1448, SEGMENT)) == (44 * 1500, 44)


def with_sums(packet: bytes, sequence: int = 2**32 - 1000, number: int = 65530) -> bytes:
    """Return a packet as a kernel hands it over: numbered, and with the sum of TCP's addresses begun."""
    made = bytearray(packet)
    ip, tcp = HEADER, HEADER + 20
    struct.pack_into("<H", made, 2, len(packet) - HEADER)  # what of it a kernel holds in one place
    made[ip + 9] = 6
    struct.pack_into("!H", made, ip + 2, len(packet) - HEADER)
    struct.pack_into("!H", made, ip + 4, number)
    struct.pack_into("!I", made, tcp + 4, sequence)
    made[tcp + 13] = 0x80 | 0x10 | 0x09  # CWR, ACK, PSH and FIN
    struct.pack_into("!H", made, ip + 10, ~summed(made[ip:tcp]) & 0xFFFF)
    struct.pack_into("!H", made, tcp + 16, summed(begun(made)))
    return bytes(made)


def begun(packet: bytes | bytearray) -> bytes:
    """Return what TCP's sum begins with: addresses, protocol, length."""
    return bytes(packet[HEADER + 12 : HEADER + 20]) + struct.pack("!HH", 6, len(packet) - HEADER - 20)


def summed(data: bytes | bytearray) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 3), (1, 2), (1, 5), (2, 5), (4, 5)])
def test_a_part_of_a_packet_is_what_a_card_would_have_sent(first: int, last: int) -> None:
    data = bytes(range(256)) * 23  # five segments, the last of them short
    whole = with_sums(tun_packet(len(data), SEGMENT))
    whole = whole[: -len(data)] + data
    part, nbytes = cut(whole, first, last)
    ip, tcp, body = HEADER, HEADER + 20, HEADER + 52
    assert struct.unpack_from("<H", part, 2) == (52,)
    assert part[body:] == data[first * SEGMENT : last * SEGMENT]
    assert on_the_wire(part) == (nbytes, last - first) and nbytes == len(part[body:]) + 52 * (last - first)
    assert struct.unpack_from("!H", part, ip + 2) == (len(part) - HEADER,)
    assert struct.unpack_from("!H", part, ip + 4) == ((65530 + first) % 2**16,)
    assert struct.unpack_from("!I", part, tcp + 4) == ((2**32 - 1000 + first * SEGMENT) % 2**32,)
    assert summed(part[ip:tcp]) == 0xFFFF
    assert struct.unpack_from("!H", part, tcp + 16) == (summed(begun(part)),)
    assert part[tcp + 13] == 0x10 | (0x80 if first == 0 else 0) | (0x09 if last == 5 else 0)
    assert destination(part) == destination(whole) and bool(part[1]) == (last - first > 1)


def test_only_packets_between_ranks_are_passed_on() -> None:
    assert destination(tun_packet(1)) == 1
    assert destination(tun_packet(1, to=bytes((10, 77, 1, 2)))) == -1
    assert destination(bytes(HEADER) + bytes((0x60,)) + bytes(60)) == -1  # IPv6
    assert destination(b"\x45" * 12) == -1


def test_lateness_adds_up() -> None:
    meter = LatenessMeter(limit=1e-3)
    for i in range(1000):
        meter.add(5.0, 0.02 if i >= 980 else 1e-4)
    meter.add(6.0, 0.0)
    found = meter.summary()
    assert (found.packets, found.seconds, found.late_seconds) == (1001, 2, 0)
    assert found.mean == pytest.approx((980 * 1e-4 + 20 * 0.02) / 1001)
    assert 0.018 < found.p99 <= found.worst == 0.02
    assert LatenessMeter(1e-3).summary().mean == 0.0
    assert limit(0.002) == 1e-3 and limit(0.1) == pytest.approx(5e-3)


def test_late_seconds_are_counted() -> None:
    meter = LatenessMeter(limit=1e-3)
    for second in range(4):
        meter.add(float(second), 0.5 if second == 2 else 0.0)
    found = meter.summary()
    assert (found.seconds, found.late_seconds, found.worst_second) == (4, 1, 0.5)


def test_a_late_second_counts_once_however_often_it_is_asked_for() -> None:
    meter = LatenessMeter(limit=1e-3)
    for i in range(20):
        meter.add(100.0 + i, 0.0)
    for now, late in ((120.1, 0.03), (120.5, 0.03), (120.9, 0.0)):
        meter.add(now, late)
        found = meter.summary()
        assert (found.seconds, found.late_seconds) == (21, 1)
    assert found.worst_second == pytest.approx(0.02)
    meter.add(121.0, 0.0)
    assert (meter.summary().seconds, meter.summary().late_seconds) == (22, 1)


def test_a_failure_is_one_sentence_with_a_shell_s_exit_code() -> None:
    assert str(RankFailure(1, -9)) == "rank 1 was ended by SIGKILL; the others were stopped"
    assert RankFailure(1, -9).exit_code == 137 and RankFailure(0, 3).exit_code == 3
