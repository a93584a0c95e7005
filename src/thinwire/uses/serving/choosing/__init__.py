"""How many tokens to draft, from what was measured."""
