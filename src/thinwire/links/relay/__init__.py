"""A relay for ranks that can only dial out: it forwards what it cannot read."""
