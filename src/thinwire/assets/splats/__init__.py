"""Scenes of 3D Gaussians: read, rendered, and packed small."""
