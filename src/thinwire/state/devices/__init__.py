"""Words of a state and tensors on other devices than the CPU."""
