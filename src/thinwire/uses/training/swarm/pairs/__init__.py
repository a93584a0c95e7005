"""Two members that make one: each trains half of the layers, as a stage of a pipeline."""
