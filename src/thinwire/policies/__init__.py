"""Policies: from what was measured to what is sent. Frozen values and pure functions."""
