"""State synchronisation over links: a publisher sends patches to its followers."""
