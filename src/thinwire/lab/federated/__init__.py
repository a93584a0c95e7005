"""Federated runs: a virtual clock, real processes, and what they leave."""
