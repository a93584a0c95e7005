"""Recipes: what an engine sends and how, one short function a published system, one file an engine."""
