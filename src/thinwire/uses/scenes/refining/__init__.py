"""What pictures of a scene ask of its splats: which may go, and how those that stay must change."""
