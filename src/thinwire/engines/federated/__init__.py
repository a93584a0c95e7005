"""Federated learning: clients train on their own data, and a server adds up what they send."""
