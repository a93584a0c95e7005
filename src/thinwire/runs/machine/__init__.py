"""This computer: processor, memory, cache folder, addresses, signals."""
