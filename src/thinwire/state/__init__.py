"""State synchronisation: a named set of tensors held at both ends, and what takes it to the next version."""
