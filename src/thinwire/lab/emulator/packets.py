"""Packets as a TUN device with segmentation offload hands them over: how much they are on a wire."""

from __future__ import annotations

from thinwire.lab.emulator.namespaces import PREFIX

HEADER = 10  # bytes of struct virtio_net_hdr before each packet
LARGEST = HEADER + (1 << 16)  # bytes
_PREFIX = bytes(PREFIX)


def destination(packet: bytes) -> int:
    """Return the rank that a packet is for, from 0; -1: none, it is no IPv4 packet between ranks."""
    if len(packet) < HEADER + 20 or packet[HEADER] >> 4 != 4 or packet[HEADER + 16 : HEADER + 19] != _PREFIX:
        return -1
    return packet[HEADER + 19] - 1


def on_the_wire(packet: bytes) -> tuple[int, int]:
    """Return bytes and segments that a network card would send: each segment has headers of its own.

    The kernel says the payload of a segment (gso_size); where it is zero, the packet is one segment.
    """
    nbytes, payload = len(packet) - HEADER, packet[4] | packet[5] << 8
    if not packet[1] or not payload:
        return nbytes, 1
    ip = (packet[HEADER] & 15) * 4
    headers = ip + (packet[HEADER + ip + 12] >> 4) * 4
    segments = -(-(nbytes - headers) // payload)
    return nbytes + (segments - 1) * headers, segments
