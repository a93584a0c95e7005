"""What packed scenes are coded with: grids, trees, transforms."""
