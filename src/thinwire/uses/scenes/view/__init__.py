"""Scenes to pictures on a CPU, and how near two pictures are."""
