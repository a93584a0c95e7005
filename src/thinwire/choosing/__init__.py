"""What to send: recipes by name, and the contract of policies that choose by measurement."""
