"""Patches: from one version of a state to a later one, made and applied."""
