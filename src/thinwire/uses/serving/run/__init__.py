"""Programs of the stages, and what they leave."""
