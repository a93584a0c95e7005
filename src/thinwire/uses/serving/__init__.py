"""Language models served by stages."""
