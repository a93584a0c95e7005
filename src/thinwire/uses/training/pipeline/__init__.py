"""Pipeline stages: activations and gradients across stage boundaries, on torch's schedules."""
