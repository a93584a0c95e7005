"""Things that are coded whole, without a run."""
