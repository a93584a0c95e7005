"""thinwire: train and fine-tune models across slow networks by sending compressed changes."""

__version__ = "0.1.0"
