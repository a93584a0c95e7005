"""Scenes as pages for a browser: one file, which needs nothing else and shows layer by layer."""
