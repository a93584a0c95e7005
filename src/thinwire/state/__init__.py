"""State synchronisation: what both ends hold of a named set of tensors, and what takes it to the next version."""
