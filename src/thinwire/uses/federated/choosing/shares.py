"""Shares of the data, and numbers short enough to travel with every packet."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.uses.federated.choosing.device import Device


def data_shares(devices: Sequence[Device]) -> list[float]:
    """Return which share of all samples each device has, in order.

    >>> data_shares([Device(0, 0.1, samples=300), Device(1, 0.1, samples=100)])
    [0.75, 0.25]
    """
    total = sum(device.samples for device in devices)
    return [device.samples / total for device in devices]


def short(value: float) -> float:
    """Return ``value`` in four digits: a codec's text travels with its packets.

    >>> short(0.0123456789)
    0.01235
    """
    return float(f"{value:.4g}")
