"""A small head that says ahead what the model will say: the head, its lessons, its work in the ring."""
