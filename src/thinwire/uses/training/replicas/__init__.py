"""Replicas: copies of a model that exchange coded gradients, or coded differences of their parameters."""
