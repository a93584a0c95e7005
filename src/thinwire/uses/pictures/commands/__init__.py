"""The command ``generate``, and a demo."""
