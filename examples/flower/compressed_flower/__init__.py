"""An app of Flower whose messages are compressed."""
