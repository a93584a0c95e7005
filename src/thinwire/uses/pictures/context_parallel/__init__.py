"""Diffusion: one transformer of diffusers over several ranks, which exchange coded keys and values."""
