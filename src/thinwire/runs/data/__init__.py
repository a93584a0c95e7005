"""Texts and images to samples: corpora, packing, batches, tasks, the loss."""
