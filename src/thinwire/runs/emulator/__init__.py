"""Emulated networks: ranks on one machine that talk through the kernel's own TCP over slow links (Linux)."""
