"""The patch code: positions and differences of words as few bytes."""
