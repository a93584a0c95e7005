"""Language models packed small, and what that left of them."""
