"""Policies of pipelines: how to send across each stage boundary, and where to cut a model."""
