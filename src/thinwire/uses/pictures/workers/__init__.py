"""Machines that wait for a host, and make its calls of a model with it."""
