"""Policies of replicas: how often, how late and how small they exchange."""
