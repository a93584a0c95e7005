"""Models by name or folder: their weights, stages, adapters and tokenizers."""
