"""What codecs compute with: bit packing, grids, scales, noise, and the compiled passes."""
