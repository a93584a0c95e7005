"""Runs of federated learning: data, splits, models and devices of virtual clients."""
