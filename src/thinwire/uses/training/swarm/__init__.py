"""Swarms: one model, trained in rounds by whoever is there."""
