"""Scene files: what others write, and what thinwire writes."""
