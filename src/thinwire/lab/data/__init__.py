"""Text to samples: corpora, packing, batches, the loss."""
