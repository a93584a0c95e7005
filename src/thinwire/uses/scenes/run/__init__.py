"""Scenes of 3D Gaussians packed small, and what that left of them."""
