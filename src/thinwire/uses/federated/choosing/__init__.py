"""Policies of federated learning: how many steps each device takes, and how it sends what came of them."""
