"""Packets as a TUN device with segmentation offload hands them over: their size on a wire, and parts of them.

Source: struct virtio_net_hdr (linux/virtio_net.h), IPv4 (RFC 791), TCP (RFC 9293).
"""

from __future__ import annotations

import struct

PREFIX = (10, 77, 0)  # rank r has the address 10.77.0.(r + 1)

HEADER = 10  # bytes of struct virtio_net_hdr before each packet
LARGEST = HEADER + (1 << 16)  # bytes
_PREFIX = bytes(PREFIX)
_TO_SUM, _ONE = 1, 0  # virtio_net_hdr: the sum is still to be made; not to be cut
_FIRST_ALONE, _LAST_ALONE = 0x80, 0x09  # TCP flags: CWR, and PSH and FIN


def destination(packet: bytes) -> int:
    """Return the rank that a packet is for, from 0; -1: none, it is no IPv4 packet between ranks."""
    if len(packet) < HEADER + 20 or packet[HEADER] >> 4 != 4 or packet[HEADER + 16 : HEADER + 19] != _PREFIX:
        return -1
    return packet[HEADER + 19] - 1


def on_the_wire(packet: bytes) -> tuple[int, int]:
    """Return bytes and segments that a network card would send: each segment has headers of its own.

    The kernel says the payload of a segment (gso_size); where it is zero, the packet is one segment.
    """
    nbytes, payload = len(packet) - HEADER, _payload(packet)
    if not payload:
        return nbytes, 1
    headers = _headers(packet)
    segments = -(-(nbytes - headers) // payload)
    return nbytes + (segments - 1) * headers, segments


def cut(packet: bytes, first: int, last: int) -> tuple[bytes, int]:
    """Return a TCP packet of the segments from ``first`` to before ``last`` alone, and its bytes on the wire.

    As a network card would send them: numbered on, the sums made anew, and flags that belong to the first or
    the last segment with that alone.
    """
    payload, headers = _payload(packet), _headers(packet)
    start, stop = HEADER + headers + first * payload, HEADER + headers + last * payload
    part = bytearray(packet[: HEADER + headers] + packet[start:stop])
    tcp = HEADER + _ip_header(packet)
    flags = part[tcp + 13]
    if first:
        flags &= ~_FIRST_ALONE
    if stop < len(packet):
        flags &= ~_LAST_ALONE
    part[tcp + 13] = flags
    _add(part, tcp + 4, "I", first * payload)  # the sequence number
    _renumber(part, tcp, first)
    if len(part) - HEADER - headers <= payload:
        part[1], part[4:6] = _ONE, bytes(2)
    struct.pack_into("<H", part, 2, headers)  # never more than the part has: the kernel would refuse it
    made = bytes(part)
    return made, on_the_wire(made)[0]


def _renumber(part: bytearray, tcp: int, first: int) -> None:
    """Bring length, number and sums of an IPv4 packet up to date; its TCP header begins at ``tcp``."""
    (before,) = struct.unpack_from("!H", part, HEADER + 2)
    length = len(part) - HEADER
    struct.pack_into("!H", part, HEADER + 2, length)
    _add(part, HEADER + 4, "H", first)
    struct.pack_into("!H", part, HEADER + 10, 0)
    words = struct.unpack_from(f"!{(tcp - HEADER) // 2}H", part, HEADER)
    struct.pack_into("!H", part, HEADER + 10, ~_folded(sum(words)) & 0xFFFF)
    if part[0] & _TO_SUM:  # what is there is the sum of addresses, protocol and length
        (partial,) = struct.unpack_from("!H", part, tcp + 16)
        struct.pack_into("!H", part, tcp + 16, _folded(partial + length + (~before & 0xFFFF)))


def _folded(total: int) -> int:
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _add(part: bytearray, at: int, kind: str, more: int) -> None:
    (value,) = struct.unpack_from("!" + kind, part, at)
    struct.pack_into("!" + kind, part, at, (value + more) % (1 << 8 * struct.calcsize("!" + kind)))


def _payload(packet: bytes) -> int:
    """Return the payload of a segment; 0: the packet is one."""
    return (packet[4] | packet[5] << 8) if packet[1] else 0


def _ip_header(packet: bytes) -> int:
    return (packet[HEADER] & 15) * 4


def _headers(packet: bytes) -> int:
    ip = _ip_header(packet)
    return ip + (packet[HEADER + ip + 12] >> 4) * 4
