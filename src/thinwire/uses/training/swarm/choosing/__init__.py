"""How much each member of a swarm does, and how it codes that: pure functions."""
