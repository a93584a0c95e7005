"""Publish a state and follow it: pushed over links, or pulled from a shared folder."""
