"""Channels: a tensor to a packet and back, with the references that both ends keep."""
