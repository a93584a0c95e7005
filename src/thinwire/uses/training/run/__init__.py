"""Training: the configuration, one rank from start to end, and what outlives it."""
