"""Videos by several machines: what frames say of each other, and a large model's step replayed."""
