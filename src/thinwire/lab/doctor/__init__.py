"""What this machine and the link to another can do, and what to change."""
