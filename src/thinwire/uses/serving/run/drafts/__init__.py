"""Draft heads: options, the program that trains one, and its file."""
