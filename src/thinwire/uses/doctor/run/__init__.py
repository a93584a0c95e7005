"""What the command does."""
