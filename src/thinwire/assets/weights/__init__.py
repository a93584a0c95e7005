"""Weights of language models, coded small: bits where they matter under a budget of bytes."""
