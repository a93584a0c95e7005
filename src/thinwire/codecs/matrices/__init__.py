"""Codecs that see a tensor as matrices."""
