"""Experts: one mixture-of-experts transformer of diffusers, its experts spread over several ranks."""
