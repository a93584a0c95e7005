"""Models that a host filled from a checkpoint by a loader of its own."""
